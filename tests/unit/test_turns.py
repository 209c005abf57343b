"""Owners take turns: nobody waits for a flood of another's, and each owner's requests begin in the order they came."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import Engine
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import Sequence
from outpace.engine.text import TextReader
from outpace.errors import ParameterError
from outpace.exact.sampling import Chooser
from tests.toy import ToyKV, ToyModel
from tests.unit.test_scheduler import make, running, seq


def owned(request: int, owner: str, priority: int = 0) -> Sequence:
    its = seq(request, [request, 1], priority=priority)
    params, tokens = its.request.params, np.array([request, 1], np.int32)
    return Sequence(replace(its.request, owner=owner), 0, Chooser.start(params, None, (), tokens), TextReader(None))


def begun(scheduler: Scheduler, rounds: int) -> list[int]:
    """Ids in the order in which they begin, in a scheduler of one row whose oldest always ends."""
    order = []
    for _ in range(rounds):
        scheduler.plan()
        scheduler.check()
        order += running(scheduler)
        for sequence in list(scheduler.running):
            scheduler.release(sequence)
    return order


def test_a_flood_of_one_holds_up_another_by_one_turn() -> None:
    scheduler = make(ToyKV(), rows=1)
    for request in range(200):
        scheduler.submit(owned(request, "flood"))
    assert begun(scheduler, 5) == [0, 1, 2, 3, 4]
    scheduler.submit(owned(900, "one"))
    assert begun(scheduler, 3) == [900, 5, 6]
    for request in (901, 902):
        scheduler.submit(owned(request, "one"))
    scheduler.submit(owned(950, "third"))
    assert begun(scheduler, 6) == [901, 950, 7, 902, 8, 9]
    scheduler.submit(owned(960, "third", priority=1))
    assert begun(scheduler, 2) == [960, 10]


def test_who_asks_again_at_once_does_not_pass_those_who_wait() -> None:
    scheduler = make(ToyKV(), rows=1)
    for request in range(4):
        scheduler.submit(owned(request, "waits"))
    order = []
    for request in range(100, 104):
        scheduler.submit(owned(request, "again"))
        order += begun(scheduler, 2)
    assert order == [0, 100, 1, 101, 2, 102, 3, 103]


def test_one_that_gave_way_comes_back_before_later_rounds() -> None:
    scheduler = make(ToyKV(), rows=2)
    for request, owner in enumerate("aaab"):
        scheduler.submit(owned(request, owner))
    scheduler.plan()
    assert running(scheduler) == [0, 3]
    assert scheduler.youngest.request.id == 3
    scheduler.preempt(scheduler.youngest)
    scheduler.submit(owned(4, "c"))
    scheduler.plan()
    assert running(scheduler) == [0, 3]
    scheduler.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 3))
def test_turns_are_even_and_each_owners_are_in_order(asked: list[tuple[str, int]], rows: int) -> None:
    scheduler = make(ToyKV(), rows=rows)
    for request, (owner, priority) in enumerate(asked):
        scheduler.submit(owned(request, owner, priority))
    order = begun(scheduler, len(asked))
    assert sorted(order) == list(range(len(asked)))
    assert scheduler.idle
    of = dict(enumerate(asked))
    assert [of[its][1] for its in order] == sorted((priority for _, priority in asked), reverse=True)
    for priority in (0, 1):
        lane = [its for its in order if of[its][1] == priority]
        for owner in "abc":
            own = [its for its in lane if of[its][0] == owner]
            assert own == sorted(own)
        for n in range(len(lane)):  # who still waits has had as many turns as any other, or one less
            turns, waiting = Counter(of[its][0] for its in lane[:n]), {of[its][0] for its in lane[n:]}
            assert all(turns[owner] >= max(turns.values(), default=0) - 1 for owner in waiting)


def test_an_owner_has_to_be_a_name() -> None:
    with Engine(ToyModel(6, max_length=50)) as engine, pytest.raises(ParameterError, match="owner"):
        engine.add([1, 2], owner=7)
