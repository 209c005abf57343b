"""The policy behind ``--size auto``: drafts what pays, and nothing where nothing does.

It maximises committed tokens per second by renewal theory: over a long run that rate is greatest when every step
maximises (expected tokens) - rate * (expected seconds), with the rate itself. Expected tokens come from calibrated
acceptance (calibration.py), expected seconds from timing.py. Size 0 is always a candidate. What drafting may lose a row
is bounded: see rows.py. All of this runs between two forwards of a few milliseconds, so it is plain Python on lists.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outpace.control.budget import Row
from outpace.control.calibration import EDGES, UNKNOWN, Bucket, Calibration, biased, kind_of, moved, odds_of
from outpace.control.cost import Cost
from outpace.control.policy import PLAIN, Decision, Load
from outpace.control.timing import Timing
from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdicts

AUTO_SIZE = 15  # most nodes a step that "auto" asks for
LEAST_REACH = 6  # nodes that a row may always ask for
FIRST_DEPTH = 4  # levels that a stepwise drafter drafts until its speed is known
SAMPLED = 4  # timing is learned from every so many steps; from all while it is new
NEW = 64  # steps
HORIZON = 48.0  # steps over which the long-run rate is averaged


@dataclass(slots=True)
class _Look:
    """A row's draft, as far as it is worth a look: nodes 0 to n - 1."""

    parents: list[int] | None  # None: a chain
    gains: list[float]  # [n] the chance that the node's whole path is accepted
    chances: list[float]  # [n] given that it is tried
    buckets: list[Bucket]  # [n]
    sources: list[str]  # [n], or of the one source
    trims: bool  # whether nodes may be dropped now that they are known
    kept: list[int] = field(default_factory=list)  # nodes that are verified, ascending


@dataclass(slots=True)
class _Step:
    """What ``learn`` needs of the step that is under way."""

    rows: Sequence[RowView] = ()
    asleep: bool = False  # nothing was asked for, and nothing is learned
    asked: int = 0  # drafting forwards, or 1 if anything was asked for
    sizes: list[int] = field(default_factory=list)  # nodes asked for, by row
    plain: float = 0.0  # seconds a plain step was expected to take
    forward: float = 0.0  # seconds that the cost table gives for the step; 0: its times are not learned from
    extra: float = 0.0  # that part of them which the drafts add
    looks: list[_Look | None] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    first: bool = False  # some row was drafted for the first time: a drafter that catches up, untypically slow


class Adaptive:
    """Drafts what pays. ``stepwise``: the source that runs a forward for every level it drafts, if there is one;
    ``mixed``: others draft beside it, so that a row may be asked for more nodes than levels; ``whole``: drafts are
    verified whole or not at all, by what they have brought so far."""

    def __init__(self, cost: Cost, *, stepwise: str | None = None, mixed: bool = False, whole: bool = False) -> None:
        self.timing = Timing(cost)
        self._stepwise, self._mixed, self._whole = stepwise, mixed, whole
        self._calibration = Calibration()
        self._rows: dict[int, Row] = {}
        self._step = _Step()
        self._steps = 0
        self._advantage = 1.0  # the long-run rate over plain decoding's
        self._tokens = self._plain_tokens = HORIZON  # decayed sums behind it

    # -- before drafting ---------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowView], most: list[int], load: Load) -> tuple[list[int], list[int]]:
        self._calibration.tick()
        if not rows or self._asleep(rows):
            self._step = _Step(rows, asleep=True)
            return [0] * len(most), [0] * len(most)
        self._step = step = _Step(rows)
        if self._stepwise is not None or self._whole:
            step.plain = self.timing.plain(load.contexts, load.prefill)
        sizes, depths = list(most), list(most)
        known = [self._row(view) for view in rows]
        if len(rows) > 1 and min(row.slack for row in known) < 0:  # some row has lost what it may to others' drafts
            sizes = depths = [0 if view.adaptive else size for view, size in zip(rows, sizes, strict=True)]
        for i, (view, row) in enumerate(zip(rows, known, strict=True)):
            if not view.adaptive or not sizes[i]:
                continue
            if row.wait:
                row.wait -= 1
                sizes[i] = depths[i] = 0
            elif self._whole:
                more = self.timing.more(len(rows) + load.prefill, sizes[i], load.contexts[i])
                if not row.trusted(step.plain) and not row.may_try(more + self.timing.surcharge, len(rows)):
                    sizes[i] = depths[i] = 0
            elif self._stepwise is not None:
                depths[i] = self._depth(i, row, self._stepwise, sizes[i], load)
                if not self._mixed:
                    sizes[i] = depths[i]
            if self._stepwise is None and not self._whole:
                sizes[i] = min(sizes[i], row.reach)
            step.first |= bool(sizes[i]) and not row.proposals
        step.sizes = sizes
        if any(sizes):
            step.asked = 1 if self._stepwise is None else max(depths)
        return sizes, depths

    def _row(self, view: RowView) -> Row:
        found = self._rows.get(view.row)
        if found is None:
            found = self._rows[view.row] = Row(kind_of(view.chooser.params))
        return found

    def _asleep(self, rows: Sequence[RowView]) -> bool:
        """Whether every row waits before it asks again; then this step is one step less to wait."""
        known = [row for view in rows if (row := self._rows.get(view.row)) is not None and row.wait and view.adaptive]
        if len(known) < len(rows):
            return False
        for row in known:
            row.wait -= 1
        return True

    def _depth(self, i: int, row: Row, source: str, most: int, load: Load) -> int:
        """How many forwards the drafter is worth for a row, by the acceptance of its past drafts at each depth."""
        timing, table = self.timing, self._calibration.table(source, row.kind)
        rate = self._rate()
        width, context = len(self._step.rows) + load.prefill, load.contexts[i]
        best, worth, gain, tokens = 0, 0.0, 1.0, 0.0
        alone = timing.drafting(0)
        for depth in range(1, (most if timing.knows_drafting else min(most, FIRST_DEPTH)) + 1):
            gain *= biased(table.bucket(depth - 1, None).chance(UNKNOWN), row.odds[depth > 1])
            tokens += gain
            spent = timing.drafting(depth) - alone + timing.more(width, depth, context) + timing.surcharge
            if tokens - rate * spent > worth:
                best, worth = depth, tokens - rate * spent
        if best and row.trusted(self._step.plain):
            return best
        loss = timing.drafting(1) + timing.more(width, 1, context) + timing.surcharge
        return int(row.may_try(loss, len(self._step.rows)))

    # -- after drafting ----------------------------------------------------------------------------------------------

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        step, timing = self._step, self.timing
        if step.asleep:
            return drafts
        widths = drafts.widths.tolist()
        if not any(widths):
            return self._nothing(rows, drafts, load)
        step.plain = timing.plain(load.contexts, load.prefill)
        rate, width = self._rate(), len(rows) + load.prefill
        floor = 0.5 * rate * timing.cheapest(width)  # a node of less gain is never worth its time
        free: list[tuple[float, int, int]] = []  # nodes to choose among: -gain, row, node
        fixed = 0
        for i, view in enumerate(rows):
            look = self._look(view, drafts, i, widths[i], floor) if widths[i] else None
            step.looks.append(look)
            if look is None:
                continue
            if not look.trims:
                look.kept = list(range(widths[i]))
                fixed += widths[i]
            elif self._rows[view.row].trusted(step.plain):
                gains = look.gains
                free.extend((-gain, i, n) for n, gain in enumerate(gains) if gain >= floor or not n)
        if len(rows) > 1 or drafts.parents is not None:
            free.sort()
        count, saved, expected = self._worth(free, width + fixed, load, rate, fixed > 0) if free else (0, 0.0, None)
        if count and len(rows) > 1:
            count = self._bearable(free[:count], width + fixed, load)
        for _, i, node in free[:count]:
            step.looks[i].kept.append(node)  # type: ignore[union-attr]  # free nodes come from looks
        self._settle(rows, load, width + fixed + count, rate, saved / count if count else 0.0)
        kept = [look.kept if look else [] for look in step.looks]
        step.decisions = [
            Decision(len(nodes), expected if look and look.trims else self._rows[view.row].ratio)
            for nodes, look, view in zip(kept, step.looks, rows, strict=True)
        ]
        now = [len(nodes) for nodes in kept]
        total, cost = sum(now), timing.cost
        if total:
            contexts = sum(context * n for context, n in zip(load.contexts, now, strict=True))
            step.extra = cost.width(width + total) - cost.width(width) + cost.position_width * contexts
        if self._timed(load):
            step.forward = cost.forward([1] * len(rows), load.contexts) + step.extra
        return drafts if now == widths else kept_of(drafts, kept)

    def _nothing(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        """Nothing was proposed: a common step, which should cost next to nothing."""
        step = self._step
        step.decisions = [
            Decision(0, ratio) if (ratio := self._rows[view.row].ratio) is not None else PLAIN for view in rows
        ]
        step.looks = [None] * len(rows)
        if self._timed(load):
            step.forward = self.timing.cost.forward([1] * len(rows), load.contexts)
        if self._stepwise is None:
            for view, size in zip(rows, step.sizes, strict=True):
                if size and view.adaptive:
                    self._rows[view.row].ask_again(0.0, self.timing, len(rows))
        return drafts

    def _timed(self, load: Load) -> bool:
        """Whether this step's times are learned from."""
        self._steps += 1
        return (self._steps < NEW or self._steps % SAMPLED == 0) and not load.prefill

    def _look(self, view: RowView, drafts: Drafts, i: int, k: int, floor: float) -> _Look:
        row = self._rows[view.row]
        sampled = drafts.q is not None and view.acceptance == "rejection"  # of those none may go now
        trims = view.adaptive and not sampled and not self._whole
        least = floor if trims else 0.0
        parents = None if drafts.parents is None else drafts.parents[i, :k].tolist()
        said = None if drafts.confidence is None else drafts.confidence[i, :k].tolist()
        one = drafts.source is None
        sources = [drafts.source_of(i, n) for n in range(1 if one else k)]
        table = self._calibration.table(sources[0], row.kind)
        look = _Look(parents, [], [], [], sources, trims)
        gains, chances, buckets, odds = look.gains, look.chances, look.buckets, row.odds
        depths: list[int] = []
        for n in range(k):
            parent = n - 1 if parents is None else parents[n]
            above = gains[parent] if parent >= 0 else 1.0
            if above < least and parents is None and n:  # the first is looked at whatever drafts cost: it may be tried
                break
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            if not one:
                table = self._calibration.table(sources[n], row.kind)
            if said is None:
                confidence, bucket = UNKNOWN, table.bucket(depth, None)
            else:
                confidence = said[n] if parent < 0 else said[n] / said[parent] if said[parent] > 0 else 0.0
                bucket = table.said[parent >= 0][bisect(EDGES, confidence)]
            chance = bucket.chance(min(max(confidence, 0.005), 0.995))
            chance = chance / (chance + (1.0 - chance) * odds[parent >= 0])
            gains.append(above * chance)
            chances.append(chance)
            buckets.append(bucket)
        return look

    def _worth(
        self, free: list[tuple[float, int, int]], width: int, load: Load, rate: float, drafted: bool
    ) -> tuple[int, float, float | None]:
        """How many of the best nodes to verify, the seconds that saves, and the best speed over plain decoding that is
        expected of any count above 0. ``width``: tokens in the forward before; ``drafted``: drafts are among them."""
        step, timing = self._step, self.timing
        rows, plain = len(step.rows), step.plain
        sunk = max(timing.drafting(step.asked) - timing.drafting(0), 0.0)
        start = plain + (0.0 if drafted else timing.surcharge)
        table, scale, slope = timing.cost.width, timing.scale, timing.cost.position_width
        bare = table(width)
        best, worth, top, fastest, tokens, contexts = 0, 0.0, 0.0, 0, 0.0, 0
        for n, (gain, i, _) in enumerate(free, 1):
            tokens -= gain
            contexts += load.contexts[i]
            seconds = start + scale * (table(width + n) - bare + slope * contexts)
            value = tokens - rate * (seconds - plain)
            if value > worth:
                best, worth = n, value
            ratio = (rows + tokens) / (seconds + sunk)
            if ratio > top:
                top, fastest = ratio, n
        if top > rate:  # better than the long run: what is left of so good a draft can be proposed again
            best = fastest
        return best, worth / rate, top * plain / rows

    def _bearable(self, nodes: list[tuple[float, int, int]], width: int, load: Load) -> int:
        """How many of ``nodes``, best first, leave every row with no more loss than it may have: one that gains
        nothing waits for those that do."""
        step, timing = self._step, self.timing
        slack = [self._rows[view.row].slack for view in step.rows]
        asked = timing.drafting(step.asked) - timing.drafting(0) + timing.surcharge
        n = len(nodes)
        while n:
            after = list(slack)
            for gain, i, _ in nodes[:n]:
                after[i] -= gain * step.plain
            contexts = sum(load.contexts[i] for _, i, _ in nodes[:n])
            more = timing.cost.width(width + n) - timing.cost.width(width) + timing.cost.position_width * contexts
            if min(after) >= asked + timing.scale * more:
                break
            n -= max(1, n // 4)
        return n

    def _settle(self, rows: Sequence[RowView], load: Load, width: int, rate: float, saved: float) -> None:
        """Rows whose drafts are not worth verifying may try one node; all learn when to ask again.

        ``saved``: seconds that each node is expected to save.
        """
        step, timing = self._step, self.timing
        for i, view in enumerate(rows):
            look, row = step.looks[i], self._rows[view.row]
            row.proposals += look is not None
            if not view.adaptive or (look is not None and not look.trims):
                continue
            worth = 0.0
            if look is not None:
                row.reach = max(LEAST_REACH, 2 * len(look.kept))
                if look.kept:
                    look.kept.sort()
                    worth = saved * len(look.kept)
                else:
                    loss = timing.more(width, 1, load.contexts[i]) + timing.surcharge - look.gains[0] / rate
                    if row.may_try(max(loss, 0.0), len(rows)):
                        look.kept = [0]
            if self._stepwise is None and step.sizes[i]:
                row.ask_again(worth, timing, len(rows))

    # -- after the verdicts ------------------------------------------------------------------------------------------

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> Sequence[Decision]:
        step, timing = self._step, self.timing
        total, rows = sum(seconds.values()), len(step.rows)
        for view in step.rows:
            self._rows[view.row].waited_for(total, rows)
        if step.asleep:
            return [PLAIN] * rows
        asking = timing.drafting(step.asked) - timing.drafting(0)
        if not any(step.looks):
            for view in step.rows:
                self._rows[view.row].lead -= asking
            self._time(seconds, drafted=False)
            self._average(1.0, 1.0)
            return step.decisions
        accepted = verdicts.accepted.tolist()
        drafted = sum(decision.size for decision in step.decisions)
        lost = timing.scale * step.extra + asking
        for i, (view, look) in enumerate(zip(step.rows, step.looks, strict=True)):
            row = self._rows[view.row]
            row.lead += accepted[i] * step.plain - lost - (timing.surcharge if drafted else 0.0)
            if look is not None and look.kept:
                self._count(row, look, verdicts.path[i, : accepted[i]].tolist())
                cost = lost * len(look.kept) / drafted
                row.balance += accepted[i] * step.plain / rows - cost
                if self._whole and view.adaptive:
                    ratio = (accepted[i] + 1) * step.plain / (step.plain + cost * rows)
                    row.ratio = ratio if row.ratio is None else 0.9 * row.ratio + 0.1 * ratio
        self._time(seconds, drafted=drafted > 0)
        self._average((rows + sum(accepted)) / rows, total / step.plain)
        return step.decisions

    def _time(self, seconds: dict[str, float], *, drafted: bool) -> None:
        step = self._step
        if step.forward:
            asked = None if step.first else step.asked
            self.timing.add(
                seconds, forward=step.forward, extra=step.extra, rows=len(step.rows), drafted=drafted, asked=asked
            )

    def _count(self, row: Row, look: _Look, path: list[int]) -> None:
        """Every node that was tried: a child of the pending token or of an accepted node. ``path``: as verified."""
        good = {look.kept[new] for new in path}
        for node in look.kept:
            parent = node - 1 if look.parents is None else look.parents[node]
            if parent >= 0 and parent not in good:
                if look.parents is None:
                    break
                continue
            accepted = node in good
            look.buckets[node].learn(accepted)
            source = look.sources[node if len(look.sources) > 1 else 0]
            if source == self._stepwise:  # what _depth goes by
                depth = _depth_of(node, look.parents)
                bucket = self._calibration.table(source, row.kind).bucket(depth, None)
                if bucket is not look.buckets[node]:
                    bucket.learn(accepted)
            deep = parent >= 0
            row.biases[deep] = moved(row.biases[deep], look.chances[node], accepted)
        row.odds = [odds_of(bias) for bias in row.biases]

    def _average(self, tokens: float, plain_steps: float) -> None:
        """The long-run advantage over plain decoding, by the same clock: tokens of a step against plain steps."""
        keep = 1.0 - 1.0 / HORIZON
        self._tokens = self._tokens * keep + tokens
        self._plain_tokens = self._plain_tokens * keep + min(plain_steps, 4.0 + tokens)
        self._advantage = min(max(self._tokens / self._plain_tokens, 1.0), 8.0)

    def _rate(self) -> float:
        """Tokens that a second must bring to be worth spending."""
        return self._advantage * len(self._step.rows) / self._step.plain

    def release(self, row: int) -> None:
        self._rows.pop(row, None)
        for other in self._rows.values():  # the batch is another one: what did not pay may pay now
            other.wait = 0


def _depth_of(node: int, parents: list[int] | None) -> int:
    if parents is None:
        return node
    depth = 0
    while parents[node] >= 0:
        node, depth = parents[node], depth + 1
    return depth


def kept_of(drafts: Drafts, keep: list[list[int]]) -> Drafts:
    """Only the nodes ``keep[i]`` (ascending, with their parents) of each row i; confidence has served its purpose."""
    widths = np.array([len(nodes) for nodes in keep], np.int32)
    if drafts.parents is None:  # a chain keeps its beginning
        return replace(drafts, widths=widths)
    w = max(len(nodes) for nodes in keep)
    parents = []
    for nodes, old in zip(keep, drafts.parents.tolist(), strict=True):
        new = {node: n for n, node in enumerate(nodes)}
        parents.append([new.get(old[node], -1) for node in nodes] + [-1] * (w - len(nodes)))
    at: Any = np.array(keep[0], np.intp)
    if len(keep) > 1:
        at = np.array([nodes + [0] * (w - len(nodes)) for nodes in keep], np.intp).reshape(len(keep), w)

    def only(values: Any) -> Any:
        if values is None:
            return None
        return values[:, at] if len(keep) == 1 else values[np.arange(len(keep))[:, None], at]

    return Drafts(
        only(drafts.tokens),
        widths,
        np.array(parents, np.int32).reshape(len(keep), w),
        only(drafts.q),
        None,
        only(drafts.source),
        drafts.sources,
    )
