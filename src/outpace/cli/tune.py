"""``outpace tune``: drafters and sizes, measured on the user's own prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from outpace.cli.bench import end, measured
from outpace.cli.command import Command
from outpace.cli.options import PROMPTS, Common, Load, size_of
from outpace.common.option import option

_LEAST = 1.02  # speed over plain decoding below which nothing is recommended
_LAYERS = 7  # numbers of layers that ``layers`` stands for
_SIZES = ("auto", 2, 4, 8)


def run(
    load: Load,
    common: Common,
    prompts: Annotated[Path, PROMPTS],
    drafter: Annotated[
        list[str] | None,
        option("--drafter", "-d", help="Repeatable; layers: seven numbers of layers. Default: ngram, suffix and auto."),
    ] = None,
    size: Annotated[
        list[Any] | None,
        option("--size", "-s", parser=size_of, metavar="N|auto", help="Repeatable. Default: auto, 2, 4 and 8."),
    ] = None,
    limit: Annotated[int, option("--limit", help="So many rows, spread evenly over the file.")] = 6,
    max_tokens: Annotated[int, option("--max-tokens", "-n", help="Most tokens an answer.")] = 64,
    temperature: Annotated[float, option("--temperature", "-T", help="0 is greedy.")] = 0.0,
) -> int:
    """Measure drafters, each with its options and in several sizes, on your prompts: which is fastest, if any pays."""
    from outpace.cli.bench_table import show
    from outpace.measure.bench import Bench, Configuration
    from outpace.measure.prompts import read_prompts
    from outpace.params import SamplingParams

    rows = read_prompts(prompts, limit)
    names = [name for asked in drafter or ("ngram", "suffix", "auto") for name in _expanded(asked, load)]
    engines = load.engines(["none", *dict.fromkeys(names)], max_rows=1, prefix_rows=0)
    ways = [Configuration("none", engines[0])]
    for name, engine in zip(dict.fromkeys(names), engines[1:], strict=True):
        own = engine.options.size  # a drafter whose spec has a size is measured with it
        sizes = dict.fromkeys(size or _SIZES) if own == "auto" else [own]
        ways += [Configuration(f"{name} --size {each}", engine, {"size": each}) for each in sizes]
    bench = Bench(ways, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0), control=True)
    found, stopped = measured(bench, rows, common, {"concurrency": 1})
    if found is not None:
        best = recommended(found["configs"])
        found["recommended"] = best
        if not common.emit(found):
            show(found, promised=True)
            print(f"use --drafter {best}" if best else "none of them pays here: decode plainly, with --drafter none")
    end(stopped, found)
    return 0


def _expanded(name: str, load: Load) -> Sequence[str]:
    """A drafter's spec; of ``layers``, which needs a number, several."""
    if name != "layers":
        return [name]
    with load.engine("none") as engine:
        depth = engine.model.info.layers
    return [f"layers:{n}" for n in sorted({max(1, depth * (i + 1) // (_LAYERS + 1)) for i in range(_LAYERS)})]


def recommended(configs: Sequence[Mapping[str, Any]]) -> str | None:
    """The fastest drafter with its size, if it is surely faster than the first configuration, plain decoding."""
    sure = [
        entry
        for entry in configs[1:]
        if entry["speedup"]["ratio"] is not None and not entry["moved"]
        and entry["speedup"]["low"] > 1 and entry["speedup"]["ratio"] >= _LEAST
    ]  # fmt: skip
    best = max(sure, key=lambda entry: float(entry["speedup"]["ratio"]), default=None)
    return None if best is None else str(best["name"])


COMMAND = Command("tune", run, "outpace tune --prompts prompts.jsonl -d suffix -d ngram:min=2 -s auto -s 4")
