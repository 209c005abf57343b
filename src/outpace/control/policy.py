"""How much every row drafts in a step. Nothing here can change a token; it only decides what is worth checking.

``Adaptive`` maximises committed tokens per second by renewal theory: over a long run that rate is greatest when every
step maximises (expected tokens) - rate * (expected seconds), with the rate itself. Expected tokens come from calibrated
acceptance (calibration.py), expected seconds from the measured cost of a forward (cost.py) and from medians of what
drafting and the engine's own work took. Size 0 is always a candidate. Trying again after switching off may cost a row
1 % of its time, no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from outpace.control.calibration import Calibration, Key, kind_of, moved
from outpace.control.cost import Cost
from outpace.drafters.base import RowView
from outpace.types import I32, Drafts, Verdicts

AUTO_SIZE = 15  # most nodes a step that "auto" asks for
EXPLORE = 0.01  # share of a row's decoding time that re-tries may cost
ALLOWANCE = 2.0  # plain steps that drafting may have lost, before what is expected of it counts for nothing
FORGIVEN = 0.005  # share of a row's decoding time that is added to the allowance
FIRST_TRIES = 3  # a new row's tries that need not be earned
PATIENCE = 12  # fruitless proposals before a row may stop asking; then it waits 8, 16, ... steps between two
LONGEST_WAIT = 64
FIRST_DEPTH = 4  # levels that a stepwise drafter drafts until its speed is known
WINDOW = 15  # samples in a median
SMALL = 0.02  # a node of less gain is never worth a look
HORIZON = 48.0  # steps over which the long-run rate is averaged


@dataclass(frozen=True, slots=True)
class Load:
    """What else is in the step: cached positions of each row, and tokens of prefill chunks."""

    contexts: Sequence[int]
    prefill: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for a row in a step, and why: the speed expected of the best draft over plain decoding."""

    size: int
    expected: float | None  # None: nothing was proposed, or a fixed size leaves nothing to decide

    def __str__(self) -> str:
        if self.expected is None:
            return "off: nothing was proposed" if not self.size else f"fixed size {self.size}"
        return f"{'on' if self.size else 'off'}: expected {self.expected:.2f}x"


_OFF = Decision(0, None)


class Policy(Protocol):
    """Chooses each row's draft: ``plan`` before drafting, ``trim`` after, ``learn`` after the verdicts."""

    def plan(self, rows: Sequence[RowView], most: I32, load: Load) -> tuple[I32, I32]:
        """Nodes to ask for and drafting forwards to allow, int32 [B] each, at most ``most``; 0 is plain decoding."""

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        """The part of ``drafts`` that is worth verifying. Keeps parents of what it keeps."""

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> list[Decision]:
        """What became of the step, with its wall time by phase; what was decided for each row."""

    def release(self, row: int) -> None:
        """The row is gone; keep nothing of it but shared averages."""


class Fixed:
    """Drafts what was asked for."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def plan(self, rows: Sequence[RowView], most: I32, load: Load) -> tuple[I32, I32]:
        return most, most

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        self._widths = drafts.widths.tolist()
        return drafts

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> list[Decision]:
        return [Decision(width, None) for width in self._widths]

    def release(self, row: int) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class _Row:
    """What is known of a row."""

    bias: float = 0.0  # of its acceptance, in log-odds
    proposals: int = 0
    fruitless: int = 0  # proposals in a row of which nothing was worth verifying
    wait: int = 0  # steps until it asks again
    waited: int = 4  # how long it waited the last time
    value: float = 0.0  # seconds that a proposal saves, lately
    balance: float = 0.0  # seconds that drafting has saved so far: what was accepted, less what it took
    tries: int = 0
    spent: float = 0.0  # seconds that tries were expected to lose
    seconds: float = 0.0  # of its decoding


@dataclass(slots=True)
class _Node:
    """A drafted node as the policy sees it. ``gain``: the chance that its whole path is accepted."""

    index: int
    parent: int  # index in the draft
    depth: int
    key: Key
    chance: float
    gain: float


@dataclass(slots=True)
class _Step:
    """What ``learn`` needs of the step that is under way."""

    rows: Sequence[RowView] = ()
    asleep: bool = False  # nothing was asked for, and nothing is learned
    asked: int = 0  # drafting forwards, or 1 if anything was asked for
    sizes: list[int] = field(default_factory=list)  # nodes asked for, by row
    forward: float = 0.0  # seconds that the cost table gives for the step
    extra: float = 0.0  # that part of them which the drafts add
    nodes: list[list[_Node]] = field(default_factory=list)  # kept ones, by their new index
    decisions: list[Decision] = field(default_factory=list)
    plain: float = 0.0  # seconds a plain step was expected to take
    first: bool = False  # some row was drafted for the first time: a drafter that catches up, untypically slow


_NEVER: Key = ("", 0, 0, -1)  # of nodes that are not looked at


class Median:
    """Of the last few samples, so that one slow step does not show."""

    def __init__(self, otherwise: float = 0.0) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self.value = otherwise

    def __bool__(self) -> bool:
        return bool(self._samples)

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = sorted(self._samples)[len(self._samples) // 2]


class Adaptive:
    """Drafts what pays. ``stepwise``: the source that runs a forward for every level it drafts, if there is one;
    ``mixed``: others draft beside it, so that a row may be asked for more nodes than levels."""

    def __init__(self, cost: Cost, *, stepwise: str | None = None, mixed: bool = False) -> None:
        self.cost, self._stepwise, self._mixed = cost, stepwise, mixed
        self._calibration = Calibration()
        self._rows: dict[int, _Row] = {}
        self._step = _Step()
        self._drafting: dict[int, Median] = {}  # seconds by drafting forwards; 0: only observing
        self._overhead = {False: Median(), True: Median()}  # outside drafting and the forward, by "drafted"
        self._slowness = {False: Median(1.0), True: Median(1.0)}  # measured over expected forwards, by "drafted"
        self._advantage = 1.0  # the long-run rate over plain decoding's
        self._tokens = self._plain_tokens = HORIZON  # decayed sums behind it

    # -- before drafting ---------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[RowView], most: I32, load: Load) -> tuple[I32, I32]:
        self._calibration.step += 1
        if rows and self._asleep(rows, most):
            self._step = _Step(rows, asleep=True)
            return np.zeros_like(most), np.zeros_like(most)
        self._step = _Step(rows, plain=self._plain(len(rows), load))
        sizes, depths = most.copy(), most.copy()
        for i, view in enumerate(rows):
            row = self._rows.setdefault(view.row, _Row())
            if not view.adaptive or not sizes[i]:
                continue
            if row.wait:
                row.wait -= 1
                sizes[i] = depths[i] = 0
            elif self._stepwise is not None:
                depths[i] = self._depth(i, view, row, self._stepwise, int(most[i]), load)
                if not self._mixed:
                    sizes[i] = depths[i]
        self._step.sizes = sizes.tolist()
        if sizes.any():
            self._step.asked = 1 if self._stepwise is None else int(depths.max())
        self._step.first = any(size and not self._rows[v.row].proposals for v, size in zip(rows, sizes, strict=True))
        return sizes, depths

    def _asleep(self, rows: Sequence[RowView], most: I32) -> bool:
        """Whether every row waits before it asks again; then this step is one step less to wait."""
        known = [self._rows.get(view.row) for view in rows]
        if not all(row is not None and row.wait for row in known) or any(not view.adaptive for view in rows):
            return False
        for row in known:
            assert row is not None
            row.wait -= 1
        return True

    def _depth(self, i: int, view: RowView, row: _Row, source: str, most: int, load: Load) -> int:
        """How many forwards the drafter is worth for a row, by the acceptance of its past drafts at each depth."""
        rate = self._rate(len(self._step.rows), self._step.plain)
        width, context = len(self._step.rows) + load.prefill, load.contexts[i]
        best, worth, gain, tokens = 0, 0.0, 1.0, 0.0
        alone = self._seconds_drafting(0)
        for depth in range(1, (most if any(self._drafting) else min(most, FIRST_DEPTH)) + 1):
            key = Calibration.key(source, kind_of(view.chooser.params), depth - 1, None)
            gain *= self._calibration.chance(key, None, row.bias)
            tokens += gain
            spent = self._seconds_drafting(depth) - alone + self._more(width, depth, context) + self._surcharge()
            if tokens - rate * spent > worth:
                best, worth = depth, tokens - rate * spent
        if best:
            return best
        return 1 if self._may_try(row, rate, self._seconds_drafting(1) + self._more(width, 1, context), 0.0) else 0

    # -- after drafting ----------------------------------------------------------------------------------------------

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        step = self._step
        if step.asleep:
            return drafts
        if not drafts.widths.any():
            for i, view in enumerate(rows):
                self._ask_again(i, self._rows[view.row], 0.0)
            step.nodes, step.decisions = [[] for _ in rows], [_OFF] * len(rows)
            if rows and not load.prefill:
                step.forward = self.cost.forward([1] * len(rows), load.contexts)
            return drafts
        rate = self._rate(len(rows), step.plain)
        every: list[list[_Node]] = []
        fixed = 0
        free: list[tuple[float, int, _Node]] = []  # nodes to choose among
        for i, view in enumerate(rows):
            nodes = self._nodes(view, drafts, i)
            every.append(nodes)
            if _trims(view, drafts):
                free.extend((-node.gain, i, node) for node in nodes)
            else:
                fixed += len(nodes)
        free.sort(key=lambda item: (item[0], item[1], item[2].index))
        width = len(rows) + load.prefill + fixed
        trusted = [item for item in free if self._trusts(self._rows[rows[item[1]].row])]
        count, saved, expected = self._worth(trusted, width, load, rate, len(rows), fixed > 0)
        chosen = [[] if _trims(view, drafts) else nodes for view, nodes in zip(rows, every, strict=True)]
        for _, i, node in trusted[:count]:
            chosen[i].append(node)
        for i, view in enumerate(rows):
            row = self._rows[view.row]
            if not _trims(view, drafts):
                continue
            if every[i]:
                row.proposals += 1
                if not chosen[i]:
                    top = min(every[i], key=lambda n: (-n.gain, n.index))
                    if self._may_try(row, rate, self._more(width + count, 1, load.contexts[i]), top.gain):
                        chosen[i] = [top]
            self._ask_again(i, row, saved * len(chosen[i]) / max(count, 1))
        step.nodes = [sorted(nodes, key=lambda n: n.index) for nodes in chosen]
        step.decisions = [
            Decision(len(nodes), expected if every[i] and rows[i].adaptive else None)
            for i, nodes in enumerate(step.nodes)
        ]
        if not load.prefill:
            step.forward = self.cost.forward([1 + len(nodes) for nodes in step.nodes], load.contexts)
            step.extra = step.forward - self.cost.forward([1] * len(rows), load.contexts)
        if sum(map(len, step.nodes)) == int(drafts.widths.sum()):
            return drafts
        return _kept(drafts, [[node.index for node in nodes] for nodes in step.nodes])

    def _nodes(self, view: RowView, drafts: Drafts, i: int) -> list[_Node]:
        k = int(drafts.widths[i])
        if not k:
            return []
        bias, kind = self._rows[view.row].bias, kind_of(view.chooser.params)
        parents = range(-1, k - 1) if drafts.parents is None else drafts.parents[i, :k].tolist()
        said = None if drafts.confidence is None else drafts.confidence[i, :k].tolist()
        nodes: list[_Node] = []
        for index, parent in enumerate(parents):
            above = nodes[parent].gain if parent >= 0 else 1.0
            if above < SMALL:  # nor is anything under it
                nodes.append(_Node(index, parent, nodes[parent].depth + 1, _NEVER, 0.0, 0.0))
                continue
            depth = nodes[parent].depth + 1 if parent >= 0 else 0
            confidence = None
            if said is not None:
                confidence = said[index] / max(said[parent], 1e-9) if parent >= 0 else said[index]
            key = Calibration.key(drafts.source_of(i, index), kind, depth, confidence)
            chance = self._calibration.chance(key, confidence, bias)
            nodes.append(_Node(index, parent, depth, key, chance, above * chance))
        return nodes

    def _worth(
        self, free: list[tuple[float, int, _Node]], width: int, load: Load, rate: float, rows: int, drafted: bool
    ) -> tuple[int, float, float | None]:
        """How many of the best nodes to verify, the seconds that saves, and the best speed over plain decoding that is
        expected of any count above 0. ``width``: tokens in the forward before; ``drafted``: drafts are among them."""
        best, worth, top, tokens, contexts = 0, 0.0, None, 0.0, 0
        plain, start = self._step.plain, 0.0 if drafted else self._surcharge()
        sunk = max(self._seconds_drafting(self._step.asked) - self._seconds_drafting(0), 0.0)
        table, slope, scale, bare = self.cost.width, self.cost.position_width, self._scale(), self.cost.width(width)
        for n, (gain, i, _) in enumerate(free, 1):
            tokens -= gain
            contexts += load.contexts[i]
            seconds = start + scale * (table(width + n) - bare + slope * contexts)
            if tokens - rate * seconds > worth:
                best, worth = n, tokens - rate * seconds
            ratio = (rows + tokens) * plain / (rows * (plain + sunk + seconds))
            if top is None or ratio > top:
                top = ratio
        return best, worth / rate, top

    def _ask_again(self, i: int, row: _Row, saved: float) -> None:
        """When row i asks for drafts next: every step while that pays, ever more rarely while it does not.

        ``saved``: seconds that its proposal is expected to save.
        """
        if self._stepwise is not None or not self._step.sizes[i]:
            return
        row.value += (saved - row.value) / 16
        if saved > 0:
            row.fruitless, row.waited = 0, 4
            return
        row.fruitless += 1
        asking = self._seconds_drafting(1)
        price = max(asking - self._seconds_drafting(0), asking / 3) / len(self._step.sizes)
        if row.fruitless >= PATIENCE and row.value < price:
            row.wait = row.waited = min(2 * row.waited, LONGEST_WAIT)

    def _trusts(self, row: _Row) -> bool:
        """Whether what is expected of a row's drafts may be believed: not while they have lost more than they may."""
        return row.balance > -ALLOWANCE * self._step.plain - FORGIVEN * row.seconds

    def _may_try(self, row: _Row, rate: float, seconds: float, gain: float) -> bool:
        """Whether a row may verify what is not expected to pay, to learn whether that is still so."""
        loss = max(seconds + self._surcharge() - gain / rate, 0.0)
        if row.tries >= FIRST_TRIES and row.spent + loss > EXPLORE * row.seconds:
            return False
        row.tries += 1
        row.spent += loss
        return True

    # -- after the verdicts ------------------------------------------------------------------------------------------

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> list[Decision]:
        step = self._step
        total = sum(seconds.values())
        if step.asleep:
            for view in step.rows:
                self._rows[view.row].seconds += total / len(step.rows)
            return [_OFF] * len(step.rows)
        gained = 0
        drafted = sum(map(len, step.nodes))
        lost = self._scale() * step.extra + self._seconds_drafting(step.asked) - self._seconds_drafting(0)
        for i, (view, nodes) in enumerate(zip(step.rows, step.nodes, strict=True)):
            accepted = int(verdicts.accepted[i])
            gained += accepted + 1
            row = self._rows.get(view.row)
            if row is None:
                continue
            row.seconds += total / len(step.rows)
            if nodes:
                self._count(row, nodes, set(verdicts.path[i, :accepted].tolist()))
                row.balance += accepted * step.plain / len(step.rows) - lost * len(nodes) / drafted
        if step.forward:
            self._slowness[drafted > 0].add(seconds["target"] / step.forward)
        if step.rows and not step.first:
            self._drafting.setdefault(step.asked, Median()).add(seconds["draft"])
        self._overhead[drafted > 0].add(seconds["verify"] + seconds["other"])
        if step.rows:
            self._average(len(step.rows), gained, step, total)
        decisions, self._step = step.decisions, _Step()
        return decisions

    def _count(self, row: _Row, nodes: list[_Node], path: set[int]) -> None:
        """Every node that was tried: a child of the pending token or of an accepted node. ``path``: new indices."""
        index = {node.index: new for new, node in enumerate(nodes)}
        for new, node in enumerate(nodes):
            if node.parent >= 0 and index[node.parent] not in path:
                continue
            accepted = new in path
            self._calibration.learn(node.key, accepted)
            if node.key[0] == self._stepwise and node.key[3] >= 0:  # what _depth goes by
                self._calibration.learn(Calibration.key(node.key[0], node.key[1], node.depth, None), accepted)
            row.bias = moved(row.bias, node.chance, accepted)

    def _average(self, rows: int, gained: int, step: _Step, total: float) -> None:
        """The long-run advantage over plain decoding, by the same clock: steps' own seconds against plain ones."""
        keep = 1.0 - 1.0 / HORIZON
        self._tokens = self._tokens * keep + gained / rows
        self._plain_tokens = self._plain_tokens * keep + min(total / step.plain, 4.0 + gained / rows)
        self._advantage = min(max(self._tokens / self._plain_tokens, 1.0), 8.0)

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    # -- seconds -----------------------------------------------------------------------------------------------------

    def _plain(self, rows: int, load: Load) -> float:
        """Seconds of a step that drafts nothing."""
        widths = [1] * rows
        seconds = self.cost.forward(widths, load.contexts) if rows else 0.0
        if load.prefill:
            seconds += self.cost.width(rows + load.prefill) - self.cost.width(rows)
        return self._slowness[False].value * seconds + self._seconds_drafting(0) + self._overhead[False].value

    def _rate(self, rows: int, plain: float) -> float:
        """Tokens per second that a second must bring to be worth spending."""
        return self._advantage * rows / plain

    def _more(self, width: int, nodes: int, context: int) -> float:
        """Seconds that ``nodes`` more tokens of a row add to a forward of ``width`` tokens."""
        cost = self.cost
        return self._scale() * (cost.width(width + nodes) - cost.width(width) + context * cost.position_width * nodes)

    def _scale(self) -> float:
        """Of the table's seconds: how slow the machine is now, as drafted steps show it."""
        plain = self._slowness[False].value
        return min(max(self._slowness[True].value if self._slowness[True] else plain, 0.8 * plain), 1.25 * plain)

    def _surcharge(self) -> float:
        """What a step with drafts takes longer than the nodes themselves: the engine's own work."""
        plain, drafted = self._overhead[False], self._overhead[True]
        return max(drafted.value - plain.value, 0.0) if plain and drafted else 0.0

    def _seconds_drafting(self, forwards: int) -> float:
        """Seconds of the draft phase: measured, or on a line through what was measured nearest."""
        known = self._drafting
        if forwards in known:
            return known[forwards].value
        base = known[0].value if 0 in known else 0.0
        others = [f for f in known if f]
        if not forwards or not others:
            return base
        near = min(others, key=lambda f: (abs(f - forwards), f))
        return base + max(known[near].value - base, 0.0) * forwards / near


def _trims(view: RowView, drafts: Drafts) -> bool:
    """Whether nodes may be dropped after they are known: not those that were drawn for ``rejection``."""
    return view.adaptive and (drafts.q is None or view.acceptance != "rejection")


def _kept(drafts: Drafts, keep: list[list[int]]) -> Drafts:
    """Only the nodes ``keep[i]`` (ascending, with their parents) of each row i."""
    widths = np.array([len(nodes) for nodes in keep], np.int32)
    if drafts.parents is None:  # a chain keeps its beginning
        return replace(drafts, widths=widths)
    w = int(widths.max(initial=0))
    at = np.zeros((len(keep), w), np.intp)
    parents = np.full((len(keep), w), -1, np.int32)
    for i, nodes in enumerate(keep):
        at[i, : len(nodes)] = nodes
        new = {node: n for n, node in enumerate(nodes)}
        old = drafts.parents[i]
        parents[i, : len(nodes)] = [new.get(int(old[node]), -1) for node in nodes]
    return Drafts(
        np.take_along_axis(drafts.tokens, at, 1),
        widths,
        parents,
        None if drafts.q is None else np.take_along_axis(drafts.q, at[:, :, None], 1),
        None if drafts.confidence is None else np.take_along_axis(drafts.confidence, at, 1),
        None if drafts.source is None else np.take_along_axis(drafts.source, at, 1),
        drafts.sources,
    )
