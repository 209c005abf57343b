"""What stands behind ``--size auto``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from outpace.control.adaptive import Adaptive
from outpace.control.cost import Cost
from outpace.control.policy import Policy

AUTO_SIZE = 15  # most nodes a step that "auto" asks for


def policy_for(cost: Cost, *, stretch: float | None = None, explain: bool = False) -> Policy:
    """A policy on a machine where forwards were measured to cost ``cost``; rows say who drafts for them.

    ``stretch``: as ``Adaptive`` has it.
    """
    return Adaptive(cost, stretch=stretch, explain=explain)


def report(cost: Cost, policy: Policy | None = None) -> dict[str, Any]:
    """For ``doctor``: the table that was measured, and what the steps of this process have taught ``policy`` beyond it
    (``learnt`` is None where it has learnt nothing)."""
    learnt = policy.learnt() if isinstance(policy, Adaptive) else None
    return {"cost": cost.to_dict(), "learnt": asdict(learnt) if learnt is not None and learnt.curves else None}
