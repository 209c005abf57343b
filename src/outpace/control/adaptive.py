"""The policy behind ``--size auto``: drafts what pays, and nothing where nothing does. It lives in C++
(native/drafting/policy.h, step_costs.h, chances.h), where steps ask it between two forwards of a few milliseconds.

It maximises committed tokens per second by renewal theory: over a long run that rate is greatest when every step
maximises (expected tokens) - rate * (expected seconds), with the rate itself. Expected tokens come from calibrated
acceptance, expected seconds from ratios of neighbouring steps, one drafted and one plain. Size 0 is always a
candidate, and what drafting may lose is bounded by a budget. docs/policy.md has all of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from outpace import _fast
from outpace.control.cost import Cost

AUTO_SIZE = 15  # most nodes a step that "auto" asks for


class Decision(NamedTuple):
    """What was decided for a row in a step, and why: the speed expected of the best draft over plain decoding."""

    size: int
    expected: float | None  # None: no draft was there to judge, or its size was fixed
    why: str = ""  # in words; with numbers where the policy was told to explain
    worth: tuple[float, ...] = ()  # the chance of each proposed node's whole path, where the policy was told to explain

    def __str__(self) -> str:
        if self.expected is None:
            return f"fixed size {self.size}" if self.size else f"off: {self.why or 'no draft was there'}"
        return f"{'on' if self.size else 'off'}: expected {self.expected:.2f}x"


@dataclass(frozen=True, slots=True)
class Curve:
    """What steps took in this process with so many rows (above 8: up to so many)."""

    rows: int
    steps: int
    plain: float  # seconds of a step without drafts, lately
    more: tuple[tuple[int, float, int], ...]  # drafted nodes, plain steps that they add, ratios that say so


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a policy has learnt in this process."""

    curves: tuple[Curve, ...]
    advantage: float  # tokens per second over plain decoding, lately
    budget: float  # plain steps that drafts may lose before they pause


class Adaptive:
    """Drafts what pays, for rows of any drafter. ``explain``: decisions carry numbers and every node's worth.

    ``stretch``: the longest that a step with drafts may take where it holds up several rows, or one beside prompts, in
    plain steps of its rows (None: any; at least 1, else ValueError). Rows with a size of their own are not held to it.
    """

    def __init__(self, cost: Cost, *, stretch: float | None = None, explain: bool = False) -> None:
        last = cost.widths[-1]
        table = [cost.width(n) for n in range(last + 1)]
        line = (float(last), cost.seconds[-1], cost.last_slope)
        slopes = (cost.row, cost.position, cost.position_width)
        longest = math.inf if stretch is None else stretch
        self._cost = cost
        read = [cost.experts_read(n) for n in range(last + 1)] if cost.read else []
        mixture = (float(cost.experts), float(cost.used), cost.expert)
        self._native = _fast.native.Policy(table, *line, *slopes, longest, *mixture, read=read)
        self._native.explain = explain

    @property
    def native(self) -> _fast.native.Policy:
        """For ``Rows.begin``."""
        return self._native

    @property
    def explain(self) -> bool:
        """Whether decisions carry numbers and every node's worth: for traces, since it takes time."""
        return self._native.explain

    @explain.setter
    def explain(self, on: bool) -> None:
        self._native.explain = on

    def release(self, row: int) -> None:
        """``row`` is gone: nothing is kept of it but shared averages."""
        self._native.release(row)

    def __len__(self) -> int:
        """Rows that it knows."""
        return len(self._native)

    def plain_steps(self, nodes: float) -> float:
        """The time of one row's step that verifies ``nodes`` drafted tokens, in plain steps, what drafting takes left
        out: as this process's steps have shown, and beyond the sizes that they had as the cost table says."""
        more = {n: added for curve in self.learnt().curves if curve.rows == 1 for n, added, _ in curve.more}
        if not more or nodes > max(more):
            return self._cost.ratio(1 + math.ceil(nodes))
        return 1.0 + float(np.interp(nodes, [0, *more], [0.0, *more.values()]))

    def learnt(self) -> Learnt:
        """What this process's steps have taught it, for people."""
        state = self._native.state()
        return Learnt(tuple(Curve(*curve) for curve in state["curves"]), state["advantage"], state["budget"])


def report(cost: Cost, policy: Adaptive | None = None) -> dict[str, Any]:
    """For ``doctor``: the table that was measured, and what the steps of this process have taught ``policy`` beyond it
    (``learnt`` is None where it has learnt nothing)."""
    learnt = None if policy is None else policy.learnt()
    return {"cost": cost.to_dict(), "learnt": asdict(learnt) if learnt is not None and learnt.curves else None}
