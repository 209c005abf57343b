"""The policy behind ``--size auto``: drafts what pays, and nothing where nothing does. It lives in C++
(native/drafting/policy.h, step_costs.h, chances.h), since it runs between two forwards of a few milliseconds.

It maximises committed tokens per second by renewal theory: over a long run that rate is greatest when every step
maximises (expected tokens) - rate * (expected seconds), with the rate itself. Expected tokens come from calibrated
acceptance, expected seconds from ratios of neighbouring steps, one drafted and one plain. Size 0 is always a
candidate, and what drafting may lose is bounded by a budget. docs/policy.md has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outpace import _fast
from outpace.control.cost import Cost
from outpace.control.policy import Decision, Load, Sizes
from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdicts


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
        self._native = _fast.native.Policy(table, *line, *slopes, longest)
        self._native.explain = explain
        self._numbers: dict[str, int] = {}  # of drafters and sources

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
        if not len(rows) == len(most) == len(load.contexts):
            raise ValueError(
                f"rows, most and contexts differ in length: {len(rows)}, {len(most)}, {len(load.contexts)}"
            )
        given = [
            (v.row, v.request, v.adaptive, n, context, self._kind(v))
            for v, n, context in zip(rows, most, load.contexts, strict=True)
        ]
        return Sizes(*self._native.plan(given, load.prefill))

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> tuple[Drafts, Sequence[Decision]]:
        given = [self._proposal(drafts, i) for i in range(len(drafts.widths))]
        kept = self._native.trim(given, drafts.q is not None)
        decisions = [Decision(*self._native.decision(i)) for i in range(len(kept))]
        if [len(nodes) for nodes in kept] == drafts.widths.tolist():
            return drafts, decisions
        return _only(drafts, kept), decisions

    def learn(self, rows: Sequence[RowView], drafts: Drafts, verdicts: Verdicts, seconds: Mapping[str, float]) -> None:
        paths = [path[:n].tolist() for path, n in zip(verdicts.path, verdicts.accepted, strict=True)]
        body = seconds["target"] + seconds["verify"] + seconds["other"]
        self._native.learn(paths, seconds["draft"], body)

    def release(self, row: int) -> None:
        self._native.release(row)

    def __len__(self) -> int:
        """Rows that it knows."""
        return len(self._native)

    def learnt(self) -> Learnt:
        """What this process's steps have taught it, for people."""
        state = self._native.state()
        return Learnt(tuple(Curve(*curve) for curve in state["curves"]), state["advantage"], state["budget"])

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _kind(self, v: RowView) -> tuple[int, bool, int, int, bool, bool]:
        sampling = self._native.sampling_class(v.chooser.params.temperature)
        levels = -1 if v.cost.levels is None else self._number(v.cost.levels)
        return sampling, v.acceptance == "rejection", self._number(v.drafter), levels, v.cost.nodes, v.cost.trims

    def _proposal(self, drafts: Drafts, i: int) -> tuple[list[int], list[float], list[int], int]:
        """Of row i: parents, gains of whole paths (nan: unknown), sources and drafting forwards."""
        n = int(drafts.widths[i])
        parents = list(range(-1, n - 1)) if drafts.parents is None else drafts.parents[i, :n].tolist()
        gains = [math.nan] * n if drafts.confidence is None else drafts.confidence[i, :n].tolist()
        sources = [self._number(name) for name in drafts.sources_of(i)]
        return parents, gains, sources, -1 if drafts.levels is None else int(drafts.levels[i])


def _only(drafts: Drafts, kept: Sequence[Sequence[int]]) -> Drafts:
    """Nodes ``kept`` of each row, ascending and with their parents."""
    widths = np.array([len(nodes) for nodes in kept], np.int32)
    take = np.zeros((len(kept), int(widths.max(initial=0))), np.intp)
    place = np.full((len(kept), drafts.tokens.shape[1] + 1), -1, np.int32)  # of an old node; the last one: no parent
    for i, nodes in enumerate(kept):
        take[i, : len(nodes)] = nodes
        place[i, nodes] = range(len(nodes))

    def of(values: Any) -> Any:
        return None if values is None else np.take_along_axis(values, take, axis=1)

    return replace(
        drafts, tokens=of(drafts.tokens), widths=widths, source=of(drafts.source), levels=None, confidence=None,
        parents=None if drafts.parents is None else np.take_along_axis(place, of(drafts.parents), axis=1),
        q=None if drafts.q is None else np.take_along_axis(drafts.q, take[..., None], axis=1),
    )  # fmt: skip
