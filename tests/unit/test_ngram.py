"""Prompt lookup against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _fast
from outpace.drafters.base import RowView
from outpace.drafters.lookup.ngram import HIT, NgramDrafter, matches, newest, newest_chain
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams


def chain(tokens: list[int], size: int, least: int, most: int) -> list[int]:
    view = RowView(0, 0, np.array(tokens, np.int32), 99, Chooser(SamplingParams(), Noise(0), 0), "coupled")
    return NgramDrafter(least, most).propose([view], np.array([size], np.int32)).row(0).tokens.tolist()


def slow_lookup(tokens: list[int], size: int, least: int, most: int) -> list[int]:
    """The longest end, ``least`` to ``most`` long, that occurs earlier; the newest occurrence; loops unrolled."""
    for n in range(min(most, len(tokens) - 1), least - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                grown = list(tokens)
                for i in range(size):
                    grown.append(grown[start + n + i])
                return grown[len(tokens) :]
    return []


@settings(deadline=None, max_examples=500)
@given(
    st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=40)),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_lookup_is_its_definition(tokens: list[int], size: int, least: int, more: int) -> None:
    assert chain(tokens, size, least, least + more) == slow_lookup(tokens, size, least, least + more)
    ids = np.array(tokens, np.int32)
    found = newest(ids, least, least + more)
    assert ([] if found is None else [found]) == matches(ids, least, least + more, 1)
    if _fast.native is not None:
        arguments = (ids, least, least + more, size, HIT)
        assert _fast.native.newest_chain(*arguments) == newest_chain(*arguments)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),  # the longest match, and on into the end itself
        ([7, 1, 5, 8, 1, 6, 9, 1], [6, 9, 1, 6]),  # among equals the newest; a loop goes round
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_examples(tokens: list[int], expected: list[int]) -> None:
    assert chain(tokens, 4, 1, 8) == expected


def test_a_batch_is_its_rows_and_no_row_exceeds_its_size() -> None:
    texts = [[1, 2, 1, 2, 1], [5, 6, 7], [3, 3, 3]]
    chooser = Chooser(SamplingParams(), Noise(0), 0)
    views = [RowView(i, i, np.array(t, np.int32), 99, chooser, "coupled") for i, t in enumerate(texts)]
    drafts = NgramDrafter().propose(views, np.array([1, 5, 3], np.int32))
    assert [drafts.row(i).tokens.tolist() for i in range(3)] == [[2], [], [3, 3, 3]]
    assert drafts.q is None
    assert drafts.sources_of(0) == ["ngram"]
