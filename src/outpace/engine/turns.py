"""Whose turn it is among sequences that wait: owners take turns within a priority, each with what it asked first.

Start-time fair queueing with every sample of one length: a sequence gets the number of the round in which it is to
begin, one after the owner's last and never below the round that is being served, and keeps it when it is preempted.
With one owner that is first come, first served. Source: Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.engine.sequence import Sequence


class Place(NamedTuple):
    """Where a sequence stands, ascending: what begins first, and gives way last."""

    below: int  # minus the priority
    round: int
    arrival: int


@dataclass(slots=True)
class _Lane:
    """Of one priority, while some wait that have not begun yet."""

    round: int  # being served
    waiting: set[int] = field(default_factory=set)  # arrivals
    last: dict[str, int] = field(default_factory=dict)  # round of an owner's last, where it is not over


class Turns:
    """Knows the sequences that wait or run; a priority that nobody waits in any more is forgotten."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # by id(sequence)
        self._lanes: dict[int, _Lane] = {}  # by Place.below
        self._arrived = self._latest = 0  # arrivals, and the latest round so far

    def join(self, sequence: Sequence) -> None:
        """It comes, and has not begun."""
        below, owner = -sequence.request.priority, sequence.request.owner
        lane = self._lanes.setdefault(below, _Lane(self._latest + 1))
        turn = max(lane.round, lane.last.get(owner, 0) + 1)
        self._arrived += 1
        self._latest = max(self._latest, turn)
        lane.last[owner] = turn
        lane.waiting.add(self._arrived)
        self._places[id(sequence)] = Place(below, turn, self._arrived)

    def begin(self, sequence: Sequence) -> None:
        """It has its row, for the first time or again."""
        place = self._places[id(sequence)]
        lane = self._waits_in(place)
        if lane is not None and place.round > lane.round:
            lane.round = place.round
            lane.last = {owner: turn for owner, turn in lane.last.items() if turn >= place.round}

    def leave(self, sequence: Sequence) -> None:
        """It is over. Does nothing for one that has left."""
        place = self._places.pop(id(sequence), None)
        if place is not None:
            self._waits_in(place)

    def of(self, sequence: Sequence) -> Place:
        """Where it stands."""
        return self._places[id(sequence)]

    def check(self, sequences: list[Sequence]) -> None:
        """Assert that ``sequences``, which wait or run, are all that it knows."""
        places = {id(s) for s in sequences}
        assert places == set(self._places), "a sequence's place is not that of one that lives"
        there = {place.arrival for place in self._places.values()}
        assert all(lane.waiting and lane.waiting <= there for lane in self._lanes.values()), "a lane nobody waits in"

    def _waits_in(self, place: Place) -> _Lane | None:
        """The lane of one that had not begun, which it waits in no more."""
        lane = self._lanes.get(place.below)
        if lane is None or place.arrival not in lane.waiting:
            return None
        lane.waiting.remove(place.arrival)
        if not lane.waiting:
            del self._lanes[place.below]
        return lane
