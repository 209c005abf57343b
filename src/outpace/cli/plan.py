"""``outpace plan``: how much to draft, from an acceptance and what drafting and verifying cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common, Load
from outpace.cli.terminal import columns, folded
from outpace.common.parameter import option


def widths_of(text: str) -> dict[int, float]:
    """``1:1,8:1.25``: the cost of a forward by its tokens. Raises ValueError."""
    found: dict[int, float] = {}
    for part in text.split(","):
        tokens, _, cost = part.partition(":")
        try:
            found[int(tokens)] = float(cost)
        except ValueError:
            raise ValueError(f"{part!r} is no cost of a forward: give tokens:cost, as in 1:1,8:1.25,16:2.1") from None
    if 1 not in found or any(n < 1 or not 0 < cost < float("inf") for n, cost in found.items()):
        raise ValueError(f"{text!r} must have the cost of 1 token, and costs above 0: as in 1:1,8:1.25,16:2.1")
    return found


def run(
    common: Common,
    load: Load,
    acceptance: Annotated[
        float, option("The chance that a drafted token is accepted, from 0 to 1.", "--acceptance", "-a")
    ],
    draft: Annotated[float, option("What drafting a token takes, in plain steps.")] = 0.0,
    costs: Annotated[
        dict[int, float] | None,
        option(
            "What a forward costs by its tokens, in any unit. Default: the model's, measured.",
            parser=widths_of,
            metavar="N:COST,...",
        ),
    ] = None,
    most: Annotated[int, option("The largest draft that is looked at.")] = 12,
    plot: Annotated[Path | None, option("Draw the curve: a .png or .svg.", metavar="FILE")] = None,
) -> int:
    """Say how many tokens to draft a step, and how fast that is, from how often a drafted token is accepted.

    A step with k drafted tokens keeps 1 + a + ... + a^k on average. `auto` weighs the same numbers in every step.
    """
    from outpace.control.cost import Cost
    from outpace.control.cost import of as measured
    from outpace.measure import plan as plans
    from outpace.measure import plot as plots

    if plot is not None:
        plots.check(plot)
    if costs is None:
        with load.engine("none") as engine:
            cost, about = measured(engine.model), f"{engine.model.info.name}, measured here"
            if cost.read:
                about += f" (of {cost.experts} experts, {cost.experts_read(most + 1):.0f} for {most + 1} unlike tokens)"
    else:
        widths = tuple(sorted(costs))
        cost, about = Cost(widths, tuple(costs[n] for n in widths)), "costs as given"
    planned = plans.plan(acceptance, draft, cost.width, most)
    top = plans.best(planned)
    if plot is not None:
        plots.draw_plan(plot, planned, f"{about}: {acceptance:.0%} accepted, a draft token {draft:g} plain steps")
    if not common.emit(
        {
            "acceptance": acceptance, "draft": draft, "costs": about, "best": top._asdict(),
            "sizes": [each._asdict() for each in planned],
        }
    ):  # fmt: skip
        given = f"{acceptance:.0%} of drafted tokens accepted, a drafted token takes {draft:g} of a plain step"
        print(folded(f"{about}: {given}") + "\n")
        print("\n".join(plans.bars(planned, columns())))
        if top.size:
            print(f"\ndraft {top.size} tokens a step: {top.speed:.2f} times plain decoding")
        else:
            print("\ndecode plainly: no draft pays at this acceptance and these costs")
    return 0


COMMAND = Command(
    "plan",
    run,
    "outpace plan -m demo --acceptance 0.7 --draft 0.05\n"
    "outpace plan -a 0.8 --draft 0.1 --costs 1:1,8:1.25,16:2.1\n"
    "outpace plan -a 0.6 --costs 1:1,8:4 --json",
)
