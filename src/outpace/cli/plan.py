"""``outpace plan``: when speculation pays, from theory or from a measured run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.common.option import option
from outpace.errors import ParameterError


def run(
    common: Common,
    alpha: Annotated[
        float | None, option("--alpha", help="Acceptance of a drafted token, given the one before it: 0 to 1.")
    ] = None,
    size: Annotated[int, option("--size", "-s", help="Tokens drafted a step.")] = 4,
    draft_cost: Annotated[
        float, option("--draft-cost", help="Drafting one token, in plain steps of the target.")
    ] = 0.0,
    width_cost: Annotated[
        float, option("--width-cost", help="A forward that verifies SIZE tokens, in plain steps.")
    ] = 1.0,
    source: Annotated[
        Path | None, option("--from", metavar="BENCH", help="Take all of them from what bench --json wrote.")
    ] = None,
) -> int:
    """Expected tokens per step, speedup, best size and break-even acceptance of speculative decoding."""
    if (alpha is None) == (source is None):
        raise ParameterError("give either --alpha (with --size, --draft-cost, --width-cost) or --from BENCH")
    if source is not None:
        return _from_bench(source, common)
    from outpace.measure.theory import StepCosts, outlook

    assert alpha is not None
    found = outlook(alpha, size, StepCosts(draft_cost, width_cost, size))
    if common.emit(asdict(found)):
        return 0
    print(f"tokens per step    {found.tokens_per_step:.2f}   (1 - a^(k+1)) / (1 - a) at a = {alpha:g}, k = {size}")
    print(f"expected speedup   {found.speedup:.2f}x")
    print(f"best size          {_best(found.best_size, found.best_speedup)}")
    print(f"break-even         {_break_even(found.break_even, size)}")
    return 0


def _from_bench(source: Path, common: Common) -> int:
    from outpace.measure.theory import from_bench, outlook

    try:
        value = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError(f"{source} cannot be read ({error}): give a file that bench --json wrote") from error
    rows: list[dict[str, Any]] = []
    for measured in from_bench(value):
        found = outlook(measured.alpha, measured.costs.size, measured.costs)
        rows.append({"measured": asdict(measured), "outlook": asdict(found)})
        if common.prints_json:
            continue
        costs = measured.costs
        print(f"{measured.name}")
        print(f"  measured         {measured.tokens_per_step:.2f} tokens a step, {measured.speedup:.2f}x")
        print(f"  drafts           in {measured.covered:.0%} of the steps, {measured.size:.1f} tokens each")
        print(f"  acceptance       {measured.alpha:.2f} of a token, given the one before it")
        print(
            f"  cost             a draft token {costs.draft:.3f}, verifying {costs.size}: {costs.width:.2f} plain steps"
        )
        print(f"  where it drafts  {found.tokens_per_step:.2f} tokens a step expected, {found.speedup:.2f}x")
        print(f"  best size        {_best(found.best_size, found.best_speedup)}")
        print(f"  break-even       {_break_even(found.break_even, costs.size)}")
    if not rows:
        raise ParameterError(f"{source} has no configuration that drafted: bench some beside none")
    common.emit(rows)
    return 0


def _best(size: int, speedup: float) -> str:
    return f"{size}: {speedup:.2f}x" if size else "0: no size pays, decode plainly"


def _break_even(alpha: float | None, size: int) -> str:
    return f"acceptance {alpha:.2f} at size {size}" if alpha is not None else f"size {size} never pays at this cost"


COMMAND = Command("plan", run, "outpace plan --alpha 0.7 --size 4 --draft-cost 0.1 --width-cost 1.2")
