"""The policy behind ``--size auto``: drafts what pays, and nothing where nothing does. It lives in C++
(native/drafting/policy.h, pace.h, chances.h), since it runs between two forwards of a few milliseconds.

It maximises committed tokens per second by renewal theory: over a long run that rate is greatest when every step
maximises (expected tokens) - rate * (expected seconds), with the rate itself. Expected tokens come from calibrated
acceptance, expected seconds from the wall time of this process's own steps, drafted and plain. Size 0 is always a
candidate, and what drafting may lose is bounded by accounts. docs/policy.md has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outpace import _fast
from outpace.control.cost import Cost
from outpace.control.policy import Decision, Load, Sizes
from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdicts

_SEAMS = {
    "Sizes": Sizes, "Decision": Decision, "Drafts": Drafts,
    "empty": np.empty, "int32": np.dtype(np.int32), "uint8": np.dtype(np.uint8),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """What steps took in this process with so many rows (or up to so many), after contexts of about ``context`` on."""

    rows: int
    context: float
    steps: int
    plain: float  # seconds of a step without drafts
    more: tuple[
        tuple[int, float, float], ...
    ]  # drafted nodes, plain steps that they add, and how sure that is (deviation)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a policy has learnt in this process."""

    curves: tuple[Curve, ...]
    advantage: float  # tokens per second over plain decoding, lately
    capital: float  # plain steps that drafting may lose before it pauses


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
        self._native = _fast.native.Policy(table, *line, *slopes, longest, _SEAMS, explain)

    @property
    def native(self) -> Any:
        """See ``Policy.native``."""
        return self._native

    @property
    def explain(self) -> bool:
        """Whether decisions carry numbers and every node's worth: for traces, since it takes time."""
        return bool(self._native.explain)

    @explain.setter
    def explain(self, on: bool) -> None:
        self._native.explain = on

    def plan(self, rows: Sequence[RowView], most: Sequence[int], load: Load) -> Sizes:
        sizes: Sizes = self._native.plan(rows, most, load)
        return sizes

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> tuple[Drafts, Sequence[Decision]]:
        kept: tuple[Drafts, Sequence[Decision]] = self._native.trim(drafts)
        return kept

    def learn(self, rows: Sequence[RowView], drafts: Drafts, verdicts: Verdicts, seconds: Mapping[str, float]) -> None:
        self._native.learn(verdicts, seconds)

    def release(self, row: int) -> None:
        self._native.release(row)

    def __len__(self) -> int:
        """Rows that it knows."""
        return len(self._native)

    def learnt(self) -> Learnt:
        """What this process's steps have taught it, for people."""
        state = self._native.state()
        curves = tuple(
            Curve(rows, context, steps, plain, tuple(more)) for rows, context, steps, plain, more in state["curves"]
        )
        return Learnt(curves, state["advantage"], state["capital"])
