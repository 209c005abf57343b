"""What steps take here and now: the measured cost of a forward, scaled by how slow the machine is at the moment, and
medians of what drafting and the engine's own work took lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outpace.control.cost import Cost

WINDOW = 15  # samples in a median
FADING = 0.95  # of a sum over steps
ALONE, TOGETHER = 1.25, 2.5  # the most that drafts may be slower than the table, over plain steps: one row; several
FURTHEST = 16  # nodes that are looked at for the cheapest way to add some


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


class Timing:
    """Seconds, all of them: of a plain step, of more nodes in a forward, of drafting."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self._drafting: dict[int, Median] = {}  # by drafting forwards; 0: only observing
        self._overhead = {False: Median(), True: Median()}  # outside drafting and the forward, by "drafted"
        self._slowness = {False: Median(1.0), True: Median(1.0)}  # measured over expected forwards, by "drafted"
        self._cheapest: dict[int, float] = {}
        self._plain = self._extra = 0.0  # decayed sums of the table's seconds for drafted steps: bare, and more
        self.scale = 1.0  # of the table's seconds: how slow the machine is now, as drafted steps show it
        self.surcharge = 0.0  # what a step with drafts takes longer than its nodes do: the engine's own work

    def plain(self, contexts: Sequence[int], prefill: int) -> float:
        """Of a step that drafts nothing, with ``prefill`` tokens of prompts beside its rows."""
        rows = len(contexts)
        seconds = self.cost.width(rows + prefill) + self.cost.row * (rows - 1)
        seconds += sum(contexts) * (self.cost.position + self.cost.position_width)
        return self._slowness[False].value * seconds + self.drafting(0) + self._overhead[False].value

    def more(self, width: int, nodes: int, context: int) -> float:
        """That ``nodes`` more tokens of a row add to a forward of ``width`` tokens."""
        cost = self.cost
        return self.scale * (cost.width(width + nodes) - cost.width(width) + context * cost.position_width * nodes)

    def cheapest(self, width: int) -> float:
        """That a node adds, at the number of nodes where it adds least."""
        found = self._cheapest.get(width)
        if found is None:
            bare = self.cost.width(width)
            found = min((self.cost.width(width + n) - bare) / n for n in range(1, FURTHEST))
            self._cheapest[width] = found
        return self.scale * found

    def drafting(self, forwards: int) -> float:
        """Of the draft phase: measured, or on a line through what was measured nearest."""
        known = self._drafting.get(forwards)
        if known is not None:
            return known.value
        base = self._drafting[0].value if 0 in self._drafting else 0.0
        others = [f for f in self._drafting if f]
        if not forwards or not others:
            return base
        near = min(others, key=lambda f: (abs(f - forwards), f))
        return base + max(self._drafting[near].value - base, 0.0) * forwards / near

    @property
    def knows_drafting(self) -> bool:
        return any(self._drafting)

    def add(
        self, seconds: dict[str, float], *, forward: float, extra: float, rows: int, drafted: bool, asked: int | None
    ) -> None:
        """A step's seconds by phase. ``forward``: what the table says; ``extra``: the part of it that drafts add;
        ``asked``: drafting forwards (None: untypical, do not count)."""
        self._slowness[drafted].add(seconds["target"] / forward)
        self._learn_scale(forward, extra, rows, drafted)
        if asked is not None:
            self._drafting.setdefault(asked, Median()).add(seconds["draft"])
        self._overhead[drafted].add(seconds["verify"] + seconds["other"])
        if self._overhead[False] and self._overhead[True]:
            self.surcharge = max(self._overhead[True].value - self._overhead[False].value, 0.0)

    def _learn_scale(self, forward: float, extra: float, rows: int, drafted: bool) -> None:
        """Charge drafts with what their steps take beyond plain ones. A batch leaves the widths of a request that were
        measured further behind, so it may be further off."""
        plain = self._slowness[False].value
        if not self._slowness[True]:
            self.scale = plain
            return
        if drafted:
            self._plain = FADING * self._plain + forward - extra
            self._extra = FADING * self._extra + extra
        seen, most = self._slowness[True].value, ALONE if rows == 1 else TOGETHER
        if rows > 1 and self._extra > 0:
            seen += (seen - plain) * self._plain / self._extra
        self.scale = min(max(seen, 0.8 * plain), most * plain)
