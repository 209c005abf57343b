"""Two versions of Outpace side by side: decoding speed of each drafter in one over the other, in one run.

    python -m benchmarks paired ../BEFORE . --prompts spec_bench_dev.jsonl --rounds 6 -d none -d suffix

Each round runs both checkouts, in turn first (A B B A ...), every one in a process of its own with the Python of its
`.venv`; every round takes other prompts. A pair is one prompt by one drafter in both. Drafters take turns
prompt by prompt, so that a slow minute hits all alike. Answers that end in a loop draft far better than other text:
the second pooled ratio is without them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figures import Measuring, add_json, at_least_one, emit
from outpace.common.arrays import repeated_tail

PHASES = ("draft", "target", "verify", "other")
# What a version's process runs. It has to work with versions that lie elsewhere inside.
WORKER = """
import json, sys
import outpace
from outpace import Engine, SamplingParams

assert outpace.__file__.startswith(sys.argv[2]), f"{outpace.__file__}: run ./scripts/setup in {sys.argv[2]}"
given = json.loads(sys.argv[1])
options = {"prefix_rows": 0}
try:
    from outpace.engine.intake import load_engines
except ImportError:
    from outpace.engine.load import load_engines
engines = load_engines(Engine, given["model"], given["drafters"], options)
params = SamplingParams(max_tokens=given["tokens"], temperature=given["temperature"], seed=1)
for engine in engines:
    engine.generate("Say hello to everyone in the room, please.", params.with_(max_tokens=40))
found = []
for i, prompt in enumerate(given["prompts"]):
    order = list(range(len(engines)))
    for j in order[i % len(order):] + order[:i % len(order)]:
        result = engines[j].generate(prompt, params)
        stats = result.stats
        found.append({
            "drafter": given["drafters"][j], "prompt": i, "tokens": list(result.token_ids), "steps": stats.steps,
            "seconds": stats.decode_seconds, "counted": len(result.token_ids) - stats.first_delta_tokens,
            "by": stats.seconds,
        })
print(json.dumps(found))
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="a checkout with a .venv")
    parser.add_argument("after", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", "-d", action="append", help="default: none, ngram:size=3, ngram and suffix")
    parser.add_argument("--limit", type=at_least_one, default=12, help="prompts a round")
    parser.add_argument("--rounds", type=at_least_one, default=4)
    parser.add_argument("--max-tokens", "-n", type=int, default=80)
    parser.add_argument("--temperature", "-T", type=float, default=0.0)
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    drafters = given.drafter or ["none", "ngram:size=3", "ngram", "suffix"]
    rows = [json.loads(line)["turns"][0] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    with Measuring() as measuring:
        for number in range(given.rounds):
            some = rows[number :: max(len(rows) // given.limit, 1)][: given.limit]
            work = {
                "model": given.model, "drafters": drafters, "prompts": some, "tokens": given.max_tokens,
                "temperature": given.temperature,
            }  # fmt: skip
            versions = [("before", given.before), ("after", given.after)]
            for name, source in versions if number % 2 == 0 else versions[::-1]:
                print(f"round {number + 1} of {given.rounds}: {name}", file=sys.stderr)
                found[name] += [{**row, "round": number} for row in _run(source.resolve(), work)]
    complete = {row["round"] for row in found["before"]} & {row["round"] for row in found["after"]}
    found = {name: [row for row in each if row["round"] in complete] for name, each in found.items()}
    emit(given, found)
    if complete:
        for drafter in drafters:
            _report(drafter, found)
    return measuring.end(0)


def _run(source: Path, work: dict[str, Any]) -> list[dict[str, Any]]:
    python = source / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{source} has no .venv: run ./scripts/setup there")
    cache = Path(tempfile.gettempdir()) / f"outpace-paired-{source.name}"  # cost tables of each version's own
    done = subprocess.run(
        [str(python), "-c", WORKER, json.dumps(work), f"{source}{os.sep}"],
        env={**os.environ, "OUTPACE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        cwd="/",
    )
    if done.returncode:
        raise SystemExit(f"{source} failed:\n{done.stderr[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _report(drafter: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """Pooled speeds, the median of the prompts' ratios, identity, and where a step's time goes."""
    by_key = {
        name: {(row["round"], row["prompt"]): row for row in rows if row["drafter"] == drafter}
        for name, rows in found.items()
    }
    speed = {
        name: {key: row["counted"] / row["seconds"] for key, row in rows.items() if row["counted"]}
        for name, rows in by_key.items()
    }
    pairs = sorted(speed["before"].keys() & speed["after"].keys())
    ratios = [speed["after"][key] / speed["before"][key] for key in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    calm = [key for key in pairs if not repeated_tail(by_key["before"][key]["tokens"])]

    def pooled_over(chosen: list[tuple[int, int]]) -> dict[str, float]:
        return {
            name: sum(rows[key]["counted"] for key in chosen) / sum(rows[key]["seconds"] for key in chosen)
            for name, rows in by_key.items()
        }

    pooled = pooled_over(pairs)
    same = sum(by_key["before"][key]["tokens"] == by_key["after"][key]["tokens"] for key in by_key["before"])
    gained = pooled["after"] / pooled["before"]
    print(f"{drafter}: {pooled['before']:.1f} -> {pooled['after']:.1f} tokens/s, pooled {gained:.3f};", end=" ")
    print(f"median of {len(pairs)} pairs {middle:.3f} ({low:.3f} to {high:.3f});", end=" ")
    print(f"same tokens {same} of {len(by_key['before'])}")
    if len(calm) < len(pairs):
        rest = pooled_over(calm) if calm else None
        figures = "-" if rest is None else f"{rest['before']:.1f} -> {rest['after']:.1f} tokens/s, pooled"
        ratio = "" if rest is None else f" {rest['after'] / rest['before']:.3f}"
        print(f"    loops end {len(pairs) - len(calm)} answers, without these {figures}{ratio}")
    for name, rows in by_key.items():
        steps = sum(row["steps"] for row in rows.values())
        parts = ", ".join(
            f"{phase} {1e6 * sum(row['by'][phase] for row in rows.values()) / steps:.0f}" for phase in PHASES
        )
        print(f"    {name}, us a step: {parts}")
