"""What each choice of a training is worth: variants at one budget of tokens, judged on the same held-out answers.

    python -m benchmarks.ablation OUT --data answers --budget 2e6 --shared='--lr 5e-4' \\
        --variant base= --variant vocab16k='--draft-vocab 16384' --variant one-step='--steps-ttt 1' \\
        --variant top-tap='--tap 26' --variant loss-lk='--loss lk' \\
        --variant medusa='--method medusa' --variant parallel='--method parallel --anchors 0.5'

A variant's text is options of ``outpace train eagle``, or of ``outpace train METHOD`` where it says ``--method METHOD``
(parallel, medusa, distil). ``--shared`` are every variant's. Seed, data, held-out answers and budget are the same for
all; judged are the weights at the end, not the best on the way. OUT/ablation.json and OUT/ablation.md are written after
every variant. The same command goes on where it stopped, in the middle of a variant, too; more variants may be added.

Figures are simulated on the target's greedy answers, with at most ``--depth`` tokens a draft; intervals are 95 %
(bootstrap over answers, the same resamples for all), and the ratio is to the first variant, over the same answers.
Greedy: tokens a step of serving a chain, as the training loop says it. T = 1: an estimate of tokens a step under
rejection; a draft is kept as far as the product of sum min(p, q) says, along the answer's own words, with p over all of
the target's tokens, so that a small draft vocabulary pays for what it lacks (``simulate.expected_steps``).

Between methods tokens a step compare, speeds do not: a level of EAGLE, a block, heads and a student cost differently.
Nor do trees, which favour EAGLE and Medusa; nor losses, which each method has its own of; and a method whose draft is
shorter than ``--depth`` is judged with its own length, which the table says.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import typer

from outpace import __version__
from outpace.cli.app import ClickException, app
from outpace.errors import OutpaceError, ParameterError
from outpace.files import check_writable, write_bytes, write_json
from outpace.measure import machine
from outpace.training.data import Answers
from outpace.training.loop import Loop, LoopOptions
from outpace.training.setup import Basics, Job, split
from outpace.training.simulate import expected_steps

F64 = npt.NDArray[np.float64]

METHODS = {  # the module that puts a training together, its shape, and where its options are
    "eagle": ("EagleShape", "EagleOptions"),
    "parallel": ("ParallelShape", "ParallelOptions"),
    "medusa": ("MedusaShape", "MedusaOptions"),
    "distil": ("StudentShape", "DistilOptions"),
}
_OWN = (
    "data",
    "out",
    "model",
    "threads",
    "device",
    "minutes",
    "epochs",
    "steps",
    "resume",
    "depth",
    "patience",
    "json",
)
_ALIKE = ("seed", "held_out", "judged", "longest")  # said once for all: in --shared
_RESAMPLES = 2000
NAME = "ablation"


@dataclass(frozen=True, slots=True)
class Variant:
    """``told``: what it was asked for in full, which a finished one has to share."""

    name: str
    method: str
    text: str
    basics: Basics
    loop: LoopOptions
    shape: Any
    options: Any

    @property
    def told(self) -> dict[str, Any]:
        its = {"shape": asdict(self.shape), "options": asdict(self.options), "basics": asdict(self.basics)}
        free = ("snapshot", "report", "steps", "epochs", "minutes")
        loop = {name: value for name, value in asdict(self.loop).items() if name not in free}
        told: dict[str, Any] = json.loads(json.dumps({"method": self.method, **its, "loop": loop}))
        return told

    def opened(self, job: Job) -> AbstractContextManager[Loop]:
        made: AbstractContextManager[Loop] = importlib.import_module(f"outpace.training.{self.method}").open_run(
            job, self.shape, self.options
        )
        return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder: the figures, and a training's folder for each variant")
    parser.add_argument("--data", type=Path, required=True, help="answers, best with states (outpace train cache)")
    parser.add_argument("--budget", type=float, required=True, help="tokens that each variant is trained on")
    parser.add_argument("--variant", action="append", required=True, metavar="NAME=OPTIONS", help="repeatable")
    parser.add_argument("--shared", default="", metavar="OPTIONS", help="of every variant; its own come after them")
    parser.add_argument("--depth", type=int, default=4, help="most tokens of a draft that count (4)")
    parser.add_argument("--model", "-m", help="the target; default: the data's")
    parser.add_argument("--threads", "-t", type=int)
    parser.add_argument("--device", default="cpu", help="where networks are trained: cpu, cuda or cuda:N")
    given = parser.parse_args(arguments)
    try:
        run(given)
    except (OutpaceError, OSError) as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ablation: interrupted; the same command goes on ({given.out})", file=sys.stderr)
        return 130
    return 0


def run(given: argparse.Namespace) -> None:
    """Raises OutpaceError, OSError."""
    if not 1 <= given.depth <= 16:
        raise ParameterError(f"--depth {given.depth} is out of range: give 1 to 16")
    variants = [parsed(text, given.shared, given.depth) for text in given.variant]
    if len({its.name for its in variants}) < len(variants):
        raise ParameterError("two variants have one name: give each its own")
    answers = Answers.open(given.data)
    head = {
        "outpace": __version__,
        "target": answers.target["fingerprint"],
        "data": answers.hash,
        "budget": int(given.budget),
        "depth": given.depth,
        "judged_on": {name: asdict(variants[0].basics)[name] for name in _ALIKE},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{NAME}.json"
    check_writable(path)
    done = known(path, head, variants)
    said = Progress(sum(its.name not in done for its in variants))
    for variant in variants:
        if variant.name in done:
            continue
        budgeted = replace(variant, loop=replace(variant.loop, epochs=epochs(answers, variant.basics, head["budget"])))
        done[variant.name] = trained(budgeted, given, said)
        told = {**head, "machine": machine.cpu(), "variants": compared(done)}
        write_json(path, told)
        write_bytes(given.out / f"{NAME}.md", "\n".join(table(told)).encode())
        said.finished()
    print("\n".join(table({**head, "variants": compared(done)})))


def parsed(text: str, shared: str, depth: int) -> Variant:
    """``NAME=OPTIONS`` as objects of the trainer. Raises ParameterError for what is not known or has to be alike."""
    name, equals, own = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.+-]+", name):
        raise ParameterError(f"--variant {text!r} is no NAME=OPTIONS: name it by letters, digits and - . _ +")
    chooser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    chooser.add_argument("--method", default="eagle")
    try:
        everybody = shlex.split(shared)
        chosen, mine = chooser.parse_known_args(shlex.split(own))
    except (ValueError, argparse.ArgumentError) as error:
        raise ParameterError(f"--variant {text!r} cannot be read ({error}): mend it") from error
    if chosen.method not in METHODS:
        raise ParameterError(f"the method {chosen.method!r} of {name} is not known: use one of {', '.join(METHODS)}")
    commands: Any = typer.main.get_command(app)
    command = commands.commands["train"].commands[chosen.method]
    needed = ["--data", ".", "--out", "."]
    try:
        its = command.make_context(name, [*needed, *everybody, *mine])
        alone = command.make_context(name, [*needed, *mine])
    except ClickException as error:
        raise ParameterError(f"the variant {name}: {error.format_message()}") from error
    for option in its.params:
        asked = its.get_parameter_source(option).name == "COMMANDLINE" and option not in ("data", "out")
        if asked and option in _OWN:
            raise ParameterError(f"the variant {name} sets {option}, which is this command's: leave it out")
        if option in _ALIKE and alone.get_parameter_source(option).name == "COMMANDLINE":
            raise ParameterError(f"the variant {name} sets {option}, which is alike for all: give it in --shared")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in its.params.items()}
    values = {key: value for key, value in {**values, "depth": depth}.items() if value is not None}
    shape, options = METHODS[chosen.method]
    module = importlib.import_module(f"outpace.training.{chosen.method}")
    objective = importlib.import_module(f"outpace.training.objectives.{chosen.method}")
    return Variant(
        name, chosen.method, own, _made(Basics, values), _made(LoopOptions, values),
        _made(getattr(module, shape), values), _made(getattr(objective, options), values),
    )  # fmt: skip


def epochs(answers: Answers, basics: Basics, budget: int) -> float:
    """How often the answers to train on are seen. Raises ParameterError for less than a batch."""
    train, _ = split(answers, basics)
    each = int(np.minimum(train.lengths(), basics.longest).sum())
    if budget < basics.tokens:
        raise ParameterError(f"--budget {budget:,} is less than a batch of {basics.tokens:,} tokens: give more")
    return budget / each


def trained(variant: Variant, given: argparse.Namespace, said: Progress) -> dict[str, Any]:
    """Train a variant to its end, from where it was left, and judge it."""
    folder = given.out / variant.name
    job = Job(given.data, folder, variant.loop, variant.basics, given.model, given.threads, given.device, said)
    said.begin(variant.name)
    with variant.opened(job) as loop:
        gone_on = loop.resume()
        said.going_on(loop)
        if gone_on:
            said(f"going on at step {loop.at.step}")
        at = loop.run()
        said("judging")
        pairs, sums = judged(loop, given.depth)
        # Of what this is judged on, so that nobody compares other answers.
        held_out = [f"{answer.id}/{answer.sample}" for answer in loop.held_out.answers]
    return {
        "told": variant.told, "options": variant.text, "steps": at.step, "tokens": at.tokens,
        "seconds": round(at.seconds, 1), "loss": at.loss, "length": pairs.pop("length"), "held_out": held_out,
        "acceptance": sums, "answers": {name: its.tolist() for name, its in pairs.items()},
    }  # fmt: skip


def judged(loop: Loop, depth: int) -> tuple[dict[str, Any], list[float]]:
    """Of each held-out answer, [answers, 2] of tokens and steps, greedily and at T = 1; the tokens of a draft that
    counted; and greedy acceptance by position."""
    objective, packing = loop.objective, loop.held_out
    objective.network.eval()
    every = range(len(packing.answers))
    packing.plan([[i] for i in every])
    greedy, sampled, tried, right = [], [], np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    length = depth
    for i in every:
        batch = packing.batch([i])
        found = objective.simulate(batch, depth)
        length = len(found.tried)
        tried[:length] += found.tried
        right[:length] += found.right
        steps, tokens = expected_steps(batch, objective.overlaps(batch)[:, :depth])
        greedy.append((found.tokens, found.steps))
        sampled.append((tokens, steps))
    shares = (right / np.maximum(tried, 1))[:length].tolist()
    return {"greedy": np.array(greedy, float), "sampled": np.array(sampled, float), "length": length}, shares


def compared(done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every variant's figures beside what it was, the first as what ratios are to."""
    first = next(iter(done.values()))
    found = {}
    for name, its in done.items():
        figures = {
            kind: figure(np.array(its["answers"][kind]), np.array(first["answers"][kind]))
            for kind in ("greedy", "sampled")
        }
        found[name] = {**its, "figures": figures}
    return found


def figure(pairs: F64, base: F64) -> dict[str, float]:
    """Pooled tokens a step of [answers, 2], and their ratio to ``base``'s, each with what 95 % of resamples are in."""
    picks = np.random.default_rng(0).integers(0, len(pairs), (_RESAMPLES, len(pairs)))

    def rate(its: F64) -> tuple[float, F64]:
        tokens, steps = its[picks].sum(1).T
        total, count = its.sum(0)
        return float(total / max(count, 1)), tokens / np.maximum(steps, 1)

    (value, values), (base_value, base_values) = rate(pairs), rate(base)
    low, high = np.quantile(values, [0.025, 0.975])
    ratio_low, ratio_high = np.quantile(values / base_values, [0.025, 0.975])
    return {
        "tokens_per_step": value, "low": float(low), "high": float(high), "ratio": value / base_value,
        "ratio_low": float(ratio_low), "ratio_high": float(ratio_high),
    }  # fmt: skip


def table(told: Mapping[str, Any]) -> Iterable[str]:
    """In Markdown."""
    variants = told["variants"]
    count = len(next(iter(variants.values()))["held_out"])
    yield (
        f"Budget {told['budget']:,} tokens, data `{told['data']}`, target `{told['target']}`; {count} held-out greedy "
        f"answers; drafts of at most {told['depth']}. Tokens a step and ratio to the first, 95 % over answers."
    )
    yield ""
    yield "| variant | method | options | tokens | draft | greedy | ratio | T = 1 | ratio | by position |"
    yield "| --- " * 10 + "|"
    for name, its in variants.items():
        cells = []
        for figures in (its["figures"]["greedy"], its["figures"]["sampled"]):
            cells.append(f"{figures['tokens_per_step']:.3f} ({figures['low']:.3f}-{figures['high']:.3f})")
            cells.append(f"{figures['ratio']:.3f} ({figures['ratio_low']:.3f}-{figures['ratio_high']:.3f})")
        by = " ".join(f"{share:.2f}" for share in its["acceptance"])
        options = f"`{its['options']}`" if its["options"] else ""
        yield (
            f"| {name} | {its['told']['method']} | {options} | {its['tokens']:,} | {its['length']} | "
            f"{' | '.join(cells)} | {by} |"
        )
    yield ""


def known(path: Path, head: Mapping[str, Any], variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
    """What a file has already. Raises ParameterError where it is of something else."""
    if not path.exists():
        return {}
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
        its = {name: there[name] for name in head}
        done: dict[str, dict[str, Any]] = dict(there["variants"])
        told = {name: one["told"] for name, one in done.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path} has no ablation that could go on ({error!r}): name another folder") from error
    for name, value in head.items():
        if its[name] != value:
            raise ParameterError(f"{path} was made with {name} {its[name]}, and this is {value}: name another folder")
    for variant in variants:
        if told.get(variant.name, variant.told) != variant.told:
            raise ParameterError(f"{path} has a variant {variant.name} of other options: give this one another name")
    return done


class Progress:
    """Lines of the training that runs, with the time that all of them have left."""

    def __init__(self, count: int) -> None:
        self.loop: Loop | None = None
        self._count, self._done, self._begun = count, 0, time.monotonic()
        self._name, self._number = "", 0
        self._before = 0.0  # of what is done: the share that an earlier run did

    def begin(self, name: str) -> None:
        self._name, self._number = name, self._number + 1

    def going_on(self, loop: Loop) -> None:
        """``loop`` runs now, perhaps from a snapshot on."""
        self.loop = loop
        self._before += self._inside()

    def finished(self) -> None:
        self.loop, self._done = None, self._done + 1
        self("done")

    def _inside(self) -> float:
        return 0.0 if self.loop is None or not self.loop.at.total else self.loop.at.step / self.loop.at.total

    def __call__(self, line: str) -> None:
        """The time left takes the variants to come to cost what those so far did."""
        share, left = self._done + self._inside(), ""
        if share > self._before:
            seconds = (time.monotonic() - self._begun) * (self._count - share) / (share - self._before)
            left = f" [{timedelta(seconds=round(seconds))} left of all]"
        print(f"{self._name} ({self._number} of {self._count}): {line}{left}", file=sys.stderr, flush=True)


def _made(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{its.name: values[its.name] for its in fields(kind) if its.name in values})


if __name__ == "__main__":
    sys.exit(main())
