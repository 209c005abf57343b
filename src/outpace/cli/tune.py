"""``outpace tune``: settings of a drafter, measured on the user's own prompts."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

from outpace.cli.command import Command, Group
from outpace.cli.options import Common, Load
from outpace.common.option import option
from outpace.errors import ParameterError

_TRIED = 7  # numbers of layers, unless they are given
_LEAST = 1.02  # speed over plain decoding below which nothing is recommended


def layers(
    load: Load,
    common: Common,
    prompts: Annotated[Path, option("--prompts", help="JSON lines with turns or prompt.")],
    limit: Annotated[int, option("--limit", help="So many rows, spread evenly over the file.")] = 6,
    max_tokens: Annotated[int, option("--max-tokens", "-n", help="Most tokens an answer.")] = 64,
    size: Annotated[int, option("--size", "-s", help="Tokens drafted a step while measuring.")] = 4,
    tried: Annotated[
        list[int] | None,
        option("--layers", help="A number of layers to try; repeatable. Default: seven of them."),
    ] = None,
) -> int:
    """How many of the target's first layers should draft (--drafter layers:N), or that none of them pay."""
    from outpace.common.progress import progress
    from outpace.measure.bench import Bench, Configuration
    from outpace.measure.prompts import read_prompts
    from outpace.measure.theory import from_bench, outlook
    from outpace.params import SamplingParams

    if not 1 <= size <= 15:
        raise ParameterError(f"--size {size} is out of range: give 1 to 15 tokens to draft while measuring")
    rows = read_prompts(prompts, limit)
    with load.engine("none") as engine:
        depth = engine.model.info.layers
    numbers = sorted(set(tried or [max(1, depth * (i + 1) // (_TRIED + 1)) for i in range(_TRIED)]))
    names = ["none", *(f"layers:{n}" for n in numbers)]
    engines = load.engines(names, size=size, max_rows=1, prefix_rows=0)
    bench = Bench(
        [Configuration(*pair) for pair in zip(names, engines, strict=True)], SamplingParams(max_tokens=max_tokens)
    )
    try:
        with progress("prompts", len(rows)) as advance:
            bench.run(rows, 1, advance)
    finally:
        for engine in engines:
            engine.close()
    measured = from_bench({"configs": bench.report(), "runs": [run.to_dict() for run in bench.runs]})
    found: list[dict[str, Any]] = []
    for one in measured:
        expected = outlook(one.alpha, one.costs.size, one.costs)
        found.append(
            {
                "layers": int(one.name.partition(":")[2]),
                "acceptance": one.alpha,
                "draft_cost": one.costs.draft,
                "tokens_per_step": one.tokens_per_step,
                "speedup": one.speedup,
                "best_size": expected.best_size,
                "best_speedup": expected.best_speedup,
            }
        )
    best = max(found, key=lambda row: row["best_speedup"], default=None)
    pays = best is not None and best["best_speedup"] >= _LEAST
    advice = f"layers:{best['layers']},size={best['best_size']}" if best is not None and pays else None
    if common.json:
        print(json_.dumps({"size": size, "layers": found, "recommended": advice}))
        return 0
    print(f"of {depth} layers  acceptance  draft cost  tokens/step  speedup   best size  expected")
    for row in found:
        print(
            f"{row['layers']:>12} {row['acceptance']:>11.0%} {row['draft_cost']:>11.2f} {row['tokens_per_step']:>12.2f}"
            f" {row['speedup']:>7.2f}x {row['best_size']:>11} {row['best_speedup']:>8.2f}x"
        )
    print(f"use --drafter {advice}" if advice else "none of them pays here: its layers were not trained to leave early")
    return 0


COMMAND = Group(
    "tune",
    "Find a drafter's best settings on your own prompts.",
    "outpace tune layers --prompts prompts.jsonl",
    (Command("layers", layers, "outpace tune layers --prompts prompts.jsonl --limit 6"),),
)
