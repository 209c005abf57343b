"""Whose turn it is among sequences that wait: owners take turns, each with its highest priority first.

Start-time fair queueing with every sample of one length: a sequence gets the number of the round in which it is to
begin, one after the owner's last and never below the round that is being served, and keeps it when it is preempted.
Priorities order what one owner asks, never one owner before another. With one owner and one priority that is first
come, first served. Source: Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import NamedTuple

from outpace.engine.sequence import Sequence


class Place(NamedTuple):
    """Where a sequence stands, ascending: what begins first, and gives way last."""

    round: int
    number: int  # of the place, in the order in which they were given out


class Turns:
    """Knows the sequences that wait or run."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # by id(sequence)
        self._arrivals: dict[int, int] = {}  # by id(sequence)
        self._waiting: dict[str, list[Sequence]] = {}  # those that have their turn to come, by owner, in order
        self._last: dict[str, int] = {}  # round of an owner's last, where it is not over
        self._round = 0  # being served
        self._latest = self._count = 0  # the latest round, and places given out, so far

    def join(self, sequence: Sequence) -> bool:
        """It comes, or has lost its turn. Whether others of its owner moved for it."""
        owner = sequence.request.owner
        if not self._waiting:
            self._round = self._latest + 1
            self._last.clear()
        self._count += 1
        turn = max(self._round, self._last.get(owner, 0) + 1)
        self._last[owner], self._latest = turn, max(self._latest, turn)
        self._arrivals.setdefault(id(sequence), self._count)
        self._places[id(sequence)] = Place(turn, self._count)
        return self.come_back(sequence)

    def come_back(self, sequence: Sequence) -> bool:
        """It waits again, with the turn that it had. Whether others of its owner moved for it."""
        waiting = self._waiting.setdefault(sequence.request.owner, [])
        bisect.insort_right(waiting, sequence, key=self._rank)
        before = [self._places[id(other)] for other in waiting]
        places = sorted(before)
        for other, place in zip(waiting, places, strict=True):
            self._places[id(other)] = place
        return places != before

    def begin(self, sequence: Sequence) -> None:
        """It has its row, for the first time or again."""
        if self._waits_no_more(sequence):
            turn = self._places[id(sequence)].round
            if turn > self._round:
                self._round = turn
                self._last = {owner: last for owner, last in self._last.items() if last >= turn}

    def leave(self, sequence: Sequence) -> None:
        """It is over. Does nothing for one that has left."""
        if id(sequence) in self._places:
            self._waits_no_more(sequence)
            del self._places[id(sequence)], self._arrivals[id(sequence)]

    def of(self, sequence: Sequence) -> Place:
        """Where it stands."""
        return self._places[id(sequence)]

    def way(self, running: list[Sequence]) -> tuple[Sequence, Sequence] | None:
        """Who comes first of owners that have no row among ``running``, and who gives way to it: the youngest of the
        owner that has most. None where nobody has two."""
        owners = Counter(s.request.owner for s in running)
        most, rows = owners.most_common(1)[0]
        first = [waiting[0] for owner, waiting in self._waiting.items() if owner not in owners]
        if not first or rows == 1:
            return None
        return min(first, key=self.of), self.youngest([s for s in running if s.request.owner == most])

    def youngest(self, sequences: list[Sequence]) -> Sequence:
        """Who gives way first: of the owner whose turn came last, the one of the lowest priority that came last."""
        last = max(sequences, key=self.of).request.owner
        return max((s for s in sequences if s.request.owner == last), key=lambda s: (-s.request.priority, self.of(s)))

    def fault(self, running: list[Sequence], waits: list[Sequence]) -> str | None:
        """What is wrong unless these, which run or wait, are all that it knows."""
        there = {id(s) for s in (*running, *waits)}
        if not there == set(self._places) == set(self._arrivals):
            return "a sequence's place is not that of one that lives"
        if not all(self._waiting.values()):
            return "an owner of none that waits"
        if sorted(id(s) for waiting in self._waiting.values() for s in waiting) != sorted(map(id, waits)):
            return "one has its turn to come that does not wait"
        for waiting in self._waiting.values():
            if not waiting == sorted(waiting, key=self._rank) == sorted(waiting, key=self.of):
                return "not in order"
        return None

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """Its order among its owner's."""
        return -sequence.request.priority, self._arrivals[id(sequence)]

    def _waits_no_more(self, sequence: Sequence) -> bool:
        """Whether its turn was to come."""
        owner = sequence.request.owner
        waiting = self._waiting.get(owner, [])
        found = next((i for i, other in enumerate(waiting) if other is sequence), None)
        if found is None:
            return False
        del waiting[found]
        if not waiting:
            del self._waiting[owner]
        return True
