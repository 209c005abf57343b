"""What stands behind ``--size auto``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outpace import _fast
from outpace.control.adaptive import Adaptive
from outpace.control.cost import Cost
from outpace.control.policy import Decision, Fixed, Load, Policy, Sizes
from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts

log = logging.getLogger(__name__)

AUTO_SIZE = 15  # most nodes a step that "auto" asks for
FEW = 3  # where there is no policy


class Few(Fixed):
    """``auto`` without the extension: a few nodes for everybody, whatever they bring. Decisions say so."""

    def plan(self, rows: Sequence[RowView], most: Sequence[int], load: Load) -> Sizes:
        nodes = [min(n, FEW) if view.adaptive else n for view, n in zip(rows, most, strict=True)]
        return Sizes(nodes, list(nodes))

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> tuple[Drafts, Sequence[Decision]]:
        why = f"at most {FEW}: the policy is in the extension, which was not built"
        return drafts, [Decision(width, None, why) for width in drafts.widths.tolist()]


def policy_for(cost: Cost, *, stretch: float | None = None, explain: bool = False) -> Policy:
    """A policy on a machine where forwards were measured to cost ``cost``; rows say who drafts for them.

    ``stretch``: as ``Adaptive`` has it. Without the extension nothing knows what a step takes, and it is logged that
    it is not kept.
    """
    if _fast.native is None:
        log.warning(
            "auto drafts at most %d tokens a step, whether they pay or not: the policy is in the C++ extension, which "
            "was not built (install a C++17 compiler and reinstall outpace, or give a size)",
            FEW,
        )
        if stretch is not None:
            log.warning("nor does auto keep step_stretch=%g there: steps with drafts may take any time", stretch)
        return Few()
    return Adaptive(cost, stretch=stretch, explain=explain)


def report(cost: Cost, policy: Policy | None = None) -> dict[str, Any]:
    """For ``doctor``: the table that was measured, and what the steps of this process have taught ``policy`` beyond it
    (``learnt`` is None where it has learnt nothing)."""
    learnt = policy.learnt() if isinstance(policy, Adaptive) else None
    return {"cost": cost.to_dict(), "learnt": asdict(learnt) if learnt is not None and learnt.curves else None}
