"""From prompts to drafters that are trained and measured, in one command; what was ended goes on.

    python -m benchmarks recipe demo-gemma OUT --prompts train.jsonl --measure other.jsonl --minutes 120
    python -m benchmarks recipe demo OUT --prompts train.jsonl --measure other.jsonl -m eagle -m parallel
    python -m benchmarks recipe demo OUT --prompts train.jsonl --measure other.jsonl -m eagle -m parallel --smoke

It runs, and prints, the commands of docs/training.md: answers and their hidden states (OUT/answers), training
(OUT/eagle), acceptance on other prompts (OUT/eagle.json). Several methods learn from the same answers, each for the
same minutes, and are compared on the same prompts. ``--smoke``: the same with a few answers and steps, to see that
everything works; such a drafter says next to nothing right. Each part ends before the next begins, and a part that has
ended is done once; a training that was ended goes on from its last snapshot.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.training.loop import SNAPSHOT

Run = Callable[[Sequence[str]], None]
ANSWERS, DONE = "answers", "trained"
METHODS = ("eagle", "parallel")  # EAGLE-3, DSpark


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done. ``limit``, ``measured``: prompts (None: all). ``train``: what ends the training, and more."""

    limit: int | None
    max_tokens: int
    measured: int | None
    train: tuple[str, ...]

    @classmethod
    def smoke(cls) -> Sizes:
        least = ("--tokens", "512", "--longest", "512", "--held-out", "0.2")
        return cls(24, 32, 2, ("--steps", "3", "--warm-up", "1", *least))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the target, as outpace loads it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines to train on")
    parser.add_argument("--measure", type=Path, required=True, help="JSON lines that it is not trained on")
    parser.add_argument("--method", "-m", action="append", choices=METHODS, help="repeatable (eagle)")
    parser.add_argument("--minutes", type=float, default=120.0, help="of training a method; answers come on top (120)")
    parser.add_argument("--limit", type=int, help="prompts to train on, spread evenly over the file: all")
    parser.add_argument("--max-tokens", "-n", type=int, default=256, help="an answer (256)")
    parser.add_argument("--measured", type=int, default=48, help="prompts to measure on (48)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--smoke", action="store_true", help="minutes instead of hours: does it work?")


def run(given: argparse.Namespace) -> int:
    sizes = Sizes(given.limit, given.max_tokens, given.measured, ("--minutes", f"{given.minutes:g}"))
    sizes = Sizes.smoke() if given.smoke else sizes
    methods = tuple(dict.fromkeys(given.method or METHODS[:1]))
    make(given.model, given.out, given.prompts, given.measure, sizes, given.threads, methods=methods)
    print("\n".join(compared(given.out, methods)))
    return 0


def make(
    model: str, out: Path, prompts: Path, measure: Path, sizes: Sizes, threads: int | None = None,
    do: Run | None = None, methods: Sequence[str] = METHODS[:1],
) -> None:  # fmt: skip
    """Every part that is not done. ``do`` runs a command of Python's (``-m``, module, arguments): a process each.

    Raises subprocess.CalledProcessError.
    """
    for command in commands(model, out, prompts, measure, sizes, threads, methods):
        print(f"$ python {shlex.join(command)}", file=sys.stderr)
        (do or _process)(command)


def commands(
    model: str, out: Path, prompts: Path, measure: Path, sizes: Sizes, threads: int | None = None,
    methods: Sequence[str] = METHODS[:1],
) -> Iterator[list[str]]:  # fmt: skip
    """What is left to do. Each command is asked for when the ones before it have ended."""
    outpace, answers = ["-m", "outpace", "train"], out / ANSWERS
    slower = [] if threads is None else ["--threads", str(threads)]
    asked = [] if sizes.limit is None else ["--limit", str(sizes.limit)]
    answered = ["--prompts", str(prompts), "--out", str(answers), "-T", "0", "-n", str(sizes.max_tokens)]
    yield [*outpace, "data", "--model", model, *answered, *asked, *slower]
    yield [*outpace, "cache", str(answers), *slower]
    for method in methods:
        drafter = out / method
        if not (drafter / DONE).is_file():
            resume = ["--resume"] if (drafter / SNAPSHOT).is_file() else []
            yield [*outpace, method, "--data", str(answers), "--out", str(drafter), *sizes.train, *slower, *resume]
            (drafter / DONE).touch()
    measured = ["--prompts", str(measure), "-n", str(sizes.max_tokens), "--model", model]
    limit = [] if sizes.measured is None else ["--limit", str(sizes.measured)]
    for method in methods:
        found = ["--method", method, str(out / method), str(out / f"{method}.json")]
        yield ["-m", "benchmarks", "acceptance", *found, *measured, *limit, *slower]


def compared(out: Path, methods: Sequence[str]) -> Iterator[str]:
    """Lines: what each method brought, in tokens a step with their 95 % intervals, and the acceptance of a chain."""
    for method in methods:
        recipe = json.loads((out / method / "config.json").read_text(encoding="utf-8"))["outpace"]["recipe"]
        yield f"{method}: {recipe['steps_taken']:,} steps, {recipe['tokens_seen']:,} tokens"
        for found in json.loads((out / f"{method}.json").read_text(encoding="utf-8"))["figures"]:
            brings = f"{found['tokens_per_step']:.2f} ({found['low']:.2f} to {found['high']:.2f}) tokens a step"
            name, accepted = found["configuration"], found["acceptance_rate"]
            yield f"    {name}, T = {found['temperature']:g}: {brings}, {accepted:.0%} of drafted tokens accepted"


def _process(command: Sequence[str]) -> None:
    subprocess.run([sys.executable, *command], check=True)
