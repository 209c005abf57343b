"""What a learned drafter gains, by category: tokens a step, acceptance by position, and identity to plain decoding.

    python -m benchmarks acceptance DRAFTER OUT.json --prompts spec_bench_dev.jsonl --prompts humaneval_dev.jsonl

Each prompt is answered plainly and by every configuration, greedy and sampled, several prompts in one batch: what a row
drafts and says does not depend on the others. OUT.json is written after every batch. Run again, the command goes on
where it stopped, with more prompts where ``--limit`` is larger; ``--minutes`` bounds one run. Sizes are fixed, so no
figure depends on how fast the machine was; speeds are ``outpace bench``'s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace import Engine, SamplingParams, __version__
from outpace.common.arrays import repeated_tail
from outpace.common.files import check_writable, write_json
from outpace.drafters.learned.checkpoint import WEIGHTS, checksum
from outpace.engine.intake import load_engines
from outpace.engine.results import Result
from outpace.errors import ParameterError
from outpace.measure.prompts import PromptRow, encode_turns, read_prompts
from outpace.models.fingerprint import identity

PLAIN = "none"
CONFIGURATIONS = {  # what is told of a drafter, by its spec
    "chain of 4": "{0},branch=1,size=4",
    "tree of 16": "{0},size=16",
    "suffix and tree of 16": "suffix+{0},size=16",
    "suffix alone, 16": "suffix:size=16",
}
TEMPERATURES = (0.0, 0.8)
_COUNTS = ("steps", "tokens", "drafted", "accepted")

Key = tuple[str, float, str]  # file and prompt, temperature, configuration


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", type=Path, help="a trained drafter's folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="repeatable: JSON lines")
    parser.add_argument("--limit", type=int, help="prompts of each file, spread evenly over it")
    parser.add_argument("--max-tokens", "-n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=8, help="prompts that run together")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--minutes", type=float, help="stop after so many, at a batch's end")


def run(given: argparse.Namespace) -> int:
    """Raises OutpaceError."""
    if given.rows < 1:
        raise ParameterError(f"--rows {given.rows} is out of range: give at least 1")
    check_writable(given.out, "JSON")
    rows = [(f"{path.stem}/{row.id}", row) for path in given.prompts for row in read_prompts(path, given.limit)]
    specs = {name: spec.format(f"{given.method}:{given.drafter}") for name, spec in CONFIGURATIONS.items()}
    options = {"max_rows": given.rows, "prefix_rows": 0, "threads": given.threads, "backend": "native"}
    engines = dict(
        zip((PLAIN, *specs), load_engines(Engine, given.model, [PLAIN, *specs.values()], options), strict=True)
    )
    try:
        head = {
            "outpace": __version__,
            "target": identity(engines[PLAIN].model),
            "drafter": checksum(given.drafter / WEIGHTS),
            "configurations": {name: spec.format(given.method) for name, spec in CONFIGURATIONS.items()},
            "max_tokens": given.max_tokens,
            "seed": given.seed,
        }
        runs = _known(given.out, head)
        deadline = None if given.minutes is None else time.monotonic() + 60 * given.minutes
        advance = _Progress(len(rows) * len(TEMPERATURES))
        for batch in _batches(rows, given.rows):
            for temperature in TEMPERATURES:
                params = SamplingParams(max_tokens=given.max_tokens, temperature=temperature, seed=given.seed)
                left = [(key, row) for key, row in batch if any((key, temperature, spec) not in runs for spec in specs)]
                if left and deadline is not None and time.monotonic() > deadline:
                    return _end(given.out, head, runs, stopped=True)
                if left:
                    runs |= measured(engines, left, params)
                    write_json(given.out, whole_file(head, runs))
                advance(len(batch))
    finally:
        for engine in engines.values():
            engine.close()
    return _end(given.out, head, runs, stopped=False)


def measured(
    engines: Mapping[str, Engine], rows: Sequence[tuple[str, PromptRow]], params: SamplingParams
) -> dict[Key, dict[str, Any]]:
    """Counts of every configuration's answers to some prompts, each beside the plain one."""
    prompts = [encode_turns(engines[PLAIN], row).tolist() for _, row in rows]
    plain: list[Result] = engines[PLAIN].generate_many(prompts, params)
    found: dict[Key, dict[str, Any]] = {}
    for name, engine in engines.items():
        if name == PLAIN:
            continue
        for (key, row), first, result in zip(rows, plain, engine.generate_many(prompts, params), strict=True):
            stats = result.stats
            found[key, params.temperature, name] = {
                "category": row.category,
                **{count: getattr(stats, count) for count in _COUNTS},
                "loop": repeated_tail(first.token_ids),
                "drafted_at": stats.drafted_at,
                "accepted_at": stats.accepted_at,
                "identical": result.token_ids == first.token_ids and result.finish_reason == first.finish_reason,
                "notes": list(result.notes),
            }
    return found


def whole_file(head: Mapping[str, Any], runs: Mapping[Key, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole file: what was measured, figures by configuration, temperature and category, every run."""
    figures = []
    for name in CONFIGURATIONS:
        for temperature in TEMPERATURES:
            chosen = [run for (_, at, name_of_run), run in runs.items() if (at, name_of_run) == (temperature, name)]
            if chosen:
                categories = dict.fromkeys(run["category"] for run in chosen)
                figures.append({
                    "configuration": name,
                    "temperature": temperature,
                    **_figures(chosen),
                    "without_loops": _figures([run for run in chosen if not run["loop"]]),
                    "by_category": {
                        category: _figures([run for run in chosen if run["category"] == category])
                        for category in categories
                    },
                })  # fmt: skip
    listed = [{"prompt": key, "temperature": at, "configuration": name, **run} for (key, at, name), run in runs.items()]
    return {**head, "figures": figures, "runs": listed}


def _figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = {count: sum(run[count] for run in runs) for count in _COUNTS}
    drafted, accepted = (_added([run[name] for run in runs]) for name in ("drafted_at", "accepted_at"))
    low, high = interval([(run["tokens"], run["steps"]) for run in runs])
    return {
        "prompts": len(runs),
        "looping": sum(run["loop"] > 0 for run in runs),
        "identical": sum(run["identical"] for run in runs),
        "failed": sum(bool(run["notes"]) for run in runs),  # some drafter gave up, or a rule ended it
        "tokens": total["tokens"],
        "tokens_per_step": total["tokens"] / max(total["steps"], 1),
        "low": low,
        "high": high,
        "acceptance_rate": total["accepted"] / max(total["drafted"], 1),
        "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True) if d],
    }


def interval(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """95 % of pooled tokens / steps (bootstrap over prompts, fixed seed)."""
    counts = np.array(pairs, np.float64).reshape(-1, 2)
    picks = np.random.default_rng(0).integers(0, max(len(counts), 1), (1000, len(counts)))
    tokens, steps = counts[picks].sum(1).T
    low, high = np.quantile(tokens / np.maximum(steps, 1), [0.025, 0.975])
    return float(low), float(high)


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max((len(counts) for counts in lists), default=0)
    return [sum(counts[i] for counts in lists if i < len(counts)) for i in range(longest)]


def _known(path: Path, head: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """The runs that a file has already. Raises ParameterError where they are of something else."""
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        recorded = {name: known[name] for name in head}
        if any("loop" not in run for run in known["runs"]):
            raise KeyError("loop")
        runs = {(run.pop("prompt"), run.pop("temperature"), run.pop("configuration")): run for run in known["runs"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(f"{path} has no measurement that could go on ({error!r}): name another file") from error
    for name, value in head.items():
        if recorded[name] != value:
            raise ParameterError(
                f"{path} was measured with {name} {recorded[name]}, and this is {value}: name another file"
            )
    return runs


def _batches(rows: Sequence[tuple[str, PromptRow]], size: int) -> list[list[tuple[str, PromptRow]]]:
    """Rows in batches, each spread over all of them, so that what is done by any time is of every category."""
    count = -(-len(rows) // size)
    return [list(rows[i::count]) for i in range(count)]


def _end(path: Path, head: Mapping[str, Any], runs: Mapping[Key, Mapping[str, Any]], *, stopped: bool) -> int:
    """Print the figures; 0 where all answers were plain decoding's."""
    figures = whole_file(head, runs)["figures"]
    for row in figures:
        positions = ", ".join(f"{share:.2f}" for share in row["acceptance_by_position"][:6])
        print(f"{row['configuration']}, T = {row['temperature']}: {row['tokens_per_step']:.2f} tokens a step "
              f"({row['low']:.2f}-{row['high']:.2f}), by position {positions}; "
              f"identical {row['identical']} of {row['prompts']}")  # fmt: skip
        print("    " + ", ".join(f"{name} {one['tokens_per_step']:.2f}" for name, one in row["by_category"].items()))
        if row["looping"]:
            rest = row["without_loops"]
            less = f"{rest['tokens_per_step']:.2f} ({rest['low']:.2f}-{rest['high']:.2f})"
            print(f"    loops end {row['looping']} answers; without these {less if rest['prompts'] else '-'}")
    if stopped:
        print(f"stopped in time: the same command goes on ({path})")
    return 0 if figures and all(row["identical"] == row["prompts"] for row in figures) else 1


class _Progress:
    def __init__(self, total: int) -> None:
        self._total, self._done, self._begun = total, 0, time.monotonic()

    def __call__(self, more: int) -> None:
        self._done += more
        print(f"{self._done} of {self._total} answers, {time.monotonic() - self._begun:.0f} s", file=sys.stderr)
