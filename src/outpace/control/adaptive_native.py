"""The policy behind ``--size auto`` in C++ (native/drafting/policy.h), for drafters that look tokens up: their drafts
cost so little that what the policy itself takes shows. ``Adaptive`` is the reference, decision for decision."""

from __future__ import annotations

from collections.abc import Sequence

from outpace._native import Policy as _Policy
from outpace.control import adaptive, calibration, timing
from outpace.control import budget as rows
from outpace.control.adaptive import kept_of
from outpace.control.calibration import kind_of
from outpace.control.cost import Cost
from outpace.control.policy import PLAIN, Decision, Load
from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdicts

_RULES = {
    "edges": calibration.EDGES, "levels": calibration.LEVELS, "fade_every": calibration.FADE_EVERY,
    "unknown": calibration.UNKNOWN, "strength": calibration.STRENGTH, "memory": calibration.MEMORY,
    "fade": calibration.FADE, "rate": calibration.RATE, "limit": calibration.LIMIT,
    "window": timing.WINDOW, "furthest": timing.FURTHEST, "fading": timing.FADING, "alone": timing.ALONE,
    "together": timing.TOGETHER,
    "explore": rows.EXPLORE, "harm": rows.HARM, "allowance": rows.ALLOWANCE, "forgiven": rows.FORGIVEN,
    "first_tries": rows.FIRST_TRIES, "patience": rows.PATIENCE, "longest_wait": rows.LONGEST_WAIT,
    "least_reach": adaptive.LEAST_REACH, "sampled": adaptive.SAMPLED, "fresh": adaptive.NEW,
    "horizon": adaptive.HORIZON,
}  # fmt: skip


class NativeAdaptive:
    """As ``Adaptive`` with neither a stepwise source nor drafts that are verified whole."""

    def __init__(self, cost: Cost) -> None:
        last = cost.widths[-1]
        table = [cost.width(n) for n in range(last)]
        line = (float(last), cost.seconds[-1], cost.last_slope)
        self._policy = _Policy(_RULES, table, *line, cost.row, cost.position, cost.position_width)
        self._sources: dict[str, int] = {}
        self._numbers: dict[tuple[str, ...], list[int]] = {(): [self._number("draft")]}
        self._asleep = False  # all rows wait, and nothing was asked for in this step
        self._decisions: list[Decision] = []

    def _number(self, source: str) -> int:
        return self._sources.setdefault(source, len(self._sources))

    def plan(self, rows: Sequence[RowView], most: list[int], load: Load) -> tuple[list[int], list[int]]:
        views = [(view.row, kind_of(view.chooser.params), view.adaptive) for view in rows]
        sizes = self._policy.plan(views, most, load.contexts, load.prefill)
        self._asleep = not sizes
        if self._asleep:
            self._decisions = [PLAIN] * len(rows)
            sizes = [0] * len(rows)
        return sizes, sizes

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        if self._asleep:
            return drafts
        numbers = self._numbers.get(drafts.sources)
        if numbers is None:
            numbers = self._numbers[drafts.sources] = [self._number(source) for source in drafts.sources]
        kept, expected, chosen = self._policy.trim(
            drafts.widths,
            drafts.tokens.shape[1],
            drafts.parents,
            drafts.confidence,
            drafts.source,
            numbers,
            [drafts.q is not None and view.acceptance == "rejection" for view in rows],
        )
        widths = [len(nodes) for nodes in kept]
        self._decisions = [
            Decision(width, expected) if its else Decision(width, None) if width else PLAIN
            for width, its in zip(widths, chosen, strict=True)
        ]
        return drafts if drafts.widths.tolist() == widths else kept_of(drafts, kept)

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> Sequence[Decision]:
        if self._asleep:
            self._policy.waited(sum(seconds.values()))
            return self._decisions
        self._policy.learn(
            verdicts.accepted.tolist(),
            verdicts.path,
            sum(seconds.values()),
            seconds["draft"],
            seconds["target"],
            seconds["verify"] + seconds["other"],
        )
        return self._decisions

    def release(self, row: int) -> None:
        self._policy.release(row)
