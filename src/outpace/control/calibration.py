"""How often drafted tokens are accepted, learned online: what a drafter's own confidence is worth.

A node is *tried* when its parent was accepted (or is the pending token). The chance that a tried node is accepted is
learned by source, kind of sampling, depth and the drafter's own conditional confidence, in buckets that all rows
share and that forget; a row's bias, in log-odds, moves all of its chances together.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

from outpace.params import SamplingParams

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)
LEVELS = 8  # depths that are told apart where a drafter gives no confidence; with one: the first, and deeper
UNKNOWN = 0.6  # chance of a node whose drafter gives none
STRENGTH = 4.0  # trials that a drafter's own word counts for
MEMORY = 400.0  # trials that a bucket remembers
FADE_EVERY, FADE = 64, 0.98  # steps, and what is left of a bucket then: what a bad spell taught is tried again
RATE = 0.15  # of a row's bias, in log-odds a trial
LIMIT = 3.0  # of a row's bias


@dataclass(slots=True)
class Bucket:
    """Nodes that are alike: how many were tried, and accepted."""

    accepted: float = 0.0
    tried: float = 0.0

    def chance(self, said: float) -> float:
        """That a node is accepted, given that it is tried and that its drafter ``said`` so."""
        return (self.accepted + STRENGTH * said) / (self.tried + STRENGTH)

    def learn(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self.accepted = self.accepted * keep + accepted
        self.tried = self.tried * keep + 1.0


class Table:
    """The buckets of one source and kind of sampling."""

    def __init__(self) -> None:
        self.said = tuple([Bucket() for _ in range(len(EDGES) + 1)] for _ in range(2))
        self.unsaid = [Bucket() for _ in range(LEVELS)]

    def bucket(self, depth: int, confidence: float | None) -> Bucket:
        """``confidence``: the drafter's chance for the node given its parent (None: it gives none)."""
        if confidence is None:
            return self.unsaid[min(depth, LEVELS - 1)]
        return self.said[depth > 0][bisect(EDGES, confidence)]


class Calibration:
    """All tables. ``tick`` is called once a step."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, int], Table] = {}
        self._steps = 0

    def table(self, source: str, kind: int) -> Table:
        found = self._tables.get((source, kind))
        if found is None:
            found = self._tables[source, kind] = Table()
        return found

    def tick(self) -> None:
        self._steps += 1
        if self._steps % FADE_EVERY == 0:
            for table in self._tables.values():
                for bucket in (*table.said[0], *table.said[1], *table.unsaid):
                    bucket.accepted *= FADE
                    bucket.tried *= FADE


def kind_of(params: SamplingParams) -> int:
    """Requests whose acceptance may be pooled: greedy, cool sampling, warm sampling."""
    return 0 if params.temperature == 0 else 1 if params.temperature < 0.9 else 2


def biased(chance: float, odds: float) -> float:
    """A chance, moved by a row's bias; ``odds`` is exp(-bias)."""
    return chance / (chance + (1.0 - chance) * odds)


def moved(bias: float, chance: float, accepted: bool) -> float:
    """A row's bias after a trial whose chance was ``chance``."""
    return max(-LIMIT, min(LIMIT, bias + RATE * (accepted - chance)))


def odds_of(bias: float) -> float:
    return math.exp(-bias)
