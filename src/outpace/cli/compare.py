"""``outpace generate --compare``: plain and drafted decoding in turn, with plain decoding again as a control."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from outpace.cli.options import Common
from outpace.cli.summary import cautions, seed_of, show_scores
from outpace.cli.terminal import Colours, coloured, folded, has_colours

if TYPE_CHECKING:
    from outpace.common.arrays import I32
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result
    from outpace.engine.statistics import Stats
    from outpace.params import SamplingParams

Report = Callable[["Engine", "Result"], dict[str, Any]]

_PATIENCE = 10.0  # seconds within which another round begins
_ROUNDS = 3


def compared(engine: Engine, tokens: I32, params: SamplingParams, common: Common, report: Report) -> int:
    """Show both answers as one, and figures pooled over all rounds. Exit code 1 for more than a near-tie.

    ``report``: what ``--json`` says of an answer alone.
    """
    from outpace.engine.statistics import pooled
    from outpace.exact.noise import fresh_seed
    from outpace.measure.bench import CONTROL, Bench, Configuration, doubt, written
    from outpace.measure.prompts import PromptRow

    params = params.with_(seed=fresh_seed() if params.seed is None else params.seed)
    row = PromptRow("prompt", "all", ("",), token_ids=tuple(tokens.tolist()))
    ways = [Configuration("plain", engine, {"drafter": False}), Configuration("drafted", engine)]
    bench, begun = Bench(ways, params, control=True), time.perf_counter()

    def repeat(bench: Bench) -> int:
        rounds = 0
        while not rounds or (rounds < _ROUNDS and time.perf_counter() - begun < _PATIENCE):
            bench.run([row], 1, lambda _: None)
            rounds += 1
        return rounds

    rounds = repeat(bench)
    plain, drafted, control = (bench.figures(name) for name in ("plain", "drafted", CONTROL))
    first = bench.runs[1]
    before = first.result.completion_tokens - first.loop
    without = None
    if first.loop and before > 1:  # the same answer, ended where the loop begins
        short = Bench(ways, params.with_(max_tokens=before, min_tokens=0))
        repeat(short)
        without = {"tokens": before, **_speeds(short.figures("drafted"))}
        without["plain_decode_tokens_per_second"] = short.figures("plain")["decode_tokens_per_second"]
    result, difference = first.result, first.difference
    found = {
        "identical": difference is None,
        "difference": None if difference is None else difference.to_dict(),
        "rounds": rounds,
        "plain_decode_tokens_per_second": plain["decode_tokens_per_second"],
        "control": control["speedup"],
        **_speeds(drafted),
        "without_loop": without,
    }
    code = 0 if difference is None or difference.near_tie else 1
    if common.emit({**report(engine, result), "compare": found}):
        return code
    colours = Colours(result.drafter)
    for piece, source in result.pieces:
        print(colours.written(piece, source), end="")
    print("\n")
    show_scores(result)
    info = engine.model.info
    if has_colours() and result.drafter != "none":
        print(folded(colours.legend))
    wide = max(12, len(result.drafter))
    for name, figures, more in (
        ("plain", plain, f"({info.name}, {info.backend} {info.dtype})"),
        (result.drafter, drafted, f"{written(drafted['speedup'])} plain's speed"),
        ("plain again", control, f"{written(control['speedup'])}: what the machine alone does to a ratio"),
    ):
        print(folded(f"{name:<{wide}} {figures['decode_tokens_per_second']:7.1f} tokens/s   {more}"))
    count = f"{rounds} {'round' if rounds == 1 else 'rounds'}"
    print(folded(f"{'figures':<{wide}} pooled over the same {count}; in brackets: 95 % over rounds"))
    if result.drafter != "none":
        stats = pooled(run.result.stats for run in bench.runs if run.configuration == "drafted")
        for line in _why(drafted, stats):
            print(folded(f"{'why':<{wide}} {line}"))
    for line in (*seed_of(params), *cautions(result, params), *result.notes):
        print(folded(f"{'note':<{wide}} {line}"))
    if without is not None:
        ratio, tokens = written(without["speedup"]), without["tokens_per_step"]
        print(folded(f"{'no loop':<{wide}} {ratio}, {tokens:.2f} tokens a step in the {before} tokens before the loop"))
    if moved := doubt(result.drafter, drafted):
        print(coloured(folded(moved), "yellow"))
    same = f"identical: {result.completion_tokens} tokens" if difference is None else str(difference)
    print(coloured(same, "bold green" if difference is None else "red" if code else "yellow"))
    return code


def _speeds(figures: Mapping[str, Any]) -> dict[str, Any]:
    names = ("decode_tokens_per_second", "speedup", "moved", "tokens_per_step", "acceptance_rate")
    return {name: figures[name] for name in names}


def _why(drafted: Mapping[str, Any], stats: Stats) -> Iterator[str]:
    """The two numbers that make the ratio: how long a step of the drafted runs took, and the tokens that it brought."""
    ratio, tokens = drafted["speedup"]["ratio"], drafted["tokens_per_step"]
    if ratio:
        took = f"a step took {tokens / ratio:.2f} plain steps, its draft included, and brought {tokens:.2f} tokens"
        yield f"{took}: {tokens:.2f} / {tokens / ratio:.2f} = {ratio:.2f}x"
    if stats.drafted:
        yield f"{stats.decision}; {stats.accepted} of {stats.drafted} drafted tokens accepted"
    else:
        yield stats.decision
