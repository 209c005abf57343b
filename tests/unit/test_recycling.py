"""The lists of ``recycle``, and trees along them, against a few lines of Python; bounds; what rows leave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.common.arrays import I32
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.drafters.lookup.recycling import HIT, RecyclingDrafter
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.errors import DrafterError
from outpace.exact.drafts import Draft
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams
from tests.toy import ToyModel
from tests.unit.test_ngram import view
from tests.unit.test_registry import context

TOKEN = st.integers(0, 6)
LISTS = st.lists(st.tuples(TOKEN, st.lists(TOKEN, min_size=len(HIT), max_size=len(HIT))), max_size=12)


def ids(*values: list[int]) -> I32:
    return np.array(values, np.int32)


def ranked(first: list[int]) -> list[int]:
    return [*first, *[-1] * (len(HIT) - len(first))]


def expected(lists: dict[int, list[int]], last: int, size: int) -> Draft:
    """The ``size`` nodes of highest path probability; ties to the node that was found first."""
    tree, found = Draft(), [(HIT[r], -1, token) for r, token in enumerate(lists.get(last, ())) if token >= 0]
    while found and len(tree) < size:
        best = max(range(len(found)), key=lambda i: found[i][0])
        gain, parent, token = found.pop(best)
        node = tree.add(token, parent, gain)
        found += [(gain * HIT[r], node, its) for r, its in enumerate(lists.get(token, ())) if its >= 0]
    return tree


@settings(deadline=None, max_examples=200)
@given(LISTS, TOKEN, st.integers(1, 20), st.integers(1, len(HIT)))
def test_a_tree_follows_the_newest_lists(steps: list[tuple[int, list[int]]], last: int, size: int, length: int) -> None:
    drafter, lists = RecyclingDrafter(), dict[int, list[int]]()
    for token, likeliest in steps:
        lists[token] = ranked(likeliest[:length])
        drafter.rank(0, np.array([token], np.int32), ids(lists[token]))
    assert drafter.trees([view([3, last])], [size]) == [expected(lists, last, size)]
    assert drafter.trees([view([3, last], row=1)], [size]) == [Draft()], "rows see each other"


@pytest.mark.parametrize("history", [False, True])
def test_released_rows_leave_nothing_but_the_history(history: bool) -> None:
    drafter = RecyclingDrafter(history=history)
    drafter.rank(4, np.array([1, 2], np.int32), ids(ranked([2]), ranked([1])))
    drafter.check([4])
    drafter.release(4)
    drafter.check([])
    assert drafter.trees([view([1])], [2])[0].tokens == ([2, 1] if history else [])


def test_lists_are_bounded_and_the_largest_table_starts_anew() -> None:
    lookup = _native.RecyclingLookup(4, (0.5,), False)
    lookup.rank(0, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)[:, None])
    lookup.rank(1, np.array([7], np.int32), ids([8]))
    assert lookup.lists == 4
    lookup.rank(1, np.array([7, 9], np.int32), ids([5], [6]))
    assert (lookup.lists, lookup.after(0, 1), lookup.after(1, 7), lookup.after(1, 9)) == (2, [], [5], [6])
    with pytest.raises(ValueError, match="ids are"):
        lookup.rank(0, np.array([7], np.int32), ids([1, 2]))
    with pytest.raises(ValueError, match="at least 1"):
        _native.RecyclingLookup(0, (0.5,), False)
    with pytest.raises(DrafterError, match="memory=1"):
        build(parse("recycle:memory=0"), context())


def test_a_composition_hands_on_what_the_target_finds_likeliest() -> None:
    part = RecyclingDrafter()
    composed = ComposedDrafter([NgramDrafter(), part])
    assert composed.needs.ranks == composed.native.ranks == len(HIT)
    composed.native.rank(0, np.array([3], np.int32), ids(ranked([5])))
    assert part.trees([view([3])], [1])[0].tokens == [5]
    composed.rank(0, np.array([3], np.int32), ids(ranked([4])))
    assert part.trees([view([3])], [1])[0].tokens == [4]


def test_lists_are_the_targets_likeliest_after_every_verified_token() -> None:
    drafter, model = RecyclingDrafter(), ToyModel(12)
    with Engine(model, drafter=drafter, size=3) as engine:
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=8))
        results = [delta.result for _ in range(3) for delta in engine.step() if delta.result]
        held = drafter.native.after(0, 3)
        engine.cancel(request)
        engine.check()
    assert not results
    with Engine(ToyModel(12)) as plain:
        params = SamplingParams(max_tokens=1, logprobs=True, top_logprobs=len(HIT))
        (first,) = plain.generate([1, 2, 3], params).logprobs
    assert held == [one.token for one in first.top]


def test_the_noise_of_a_request_plays_no_part() -> None:
    """Lists are of the raw logits: a sampled request drafts as a greedy one does."""
    drafter = RecyclingDrafter()
    drafter.rank(0, np.array([1], np.int32), ids(ranked([2, 3])))
    sampled = view([1])._replace(chooser=Chooser(SamplingParams(temperature=1.0), Noise(1), 0))
    assert drafter.trees([sampled], [2]) == drafter.trees([view([1])], [2])
