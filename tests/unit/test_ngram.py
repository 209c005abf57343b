"""Prompt lookup against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.base import RowView
from outpace.drafters.lookup.ngram import HIT, OLDER, NgramDrafter
from outpace.exact.drafts import Draft, merge
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams


def view(tokens: list[int], row: int = 0) -> RowView:
    return RowView(row, row, np.array(tokens, np.int32), 99, Chooser(SamplingParams(), Noise(0), 0), "coupled")


def chain(tokens: list[int], size: int, least: int, most: int) -> list[int]:
    return NgramDrafter(least, most).propose([view(tokens)], np.array([size], np.int32)).row(0).tokens


def defined(tokens: list[int], size: int, least: int, most: int, candidates: int) -> Draft:
    """The longest ends, ``least`` to ``most`` long, that occur earlier, the newest first; loops unrolled."""
    places = []
    for start in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(most, start) and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= least:
            places.append((length, start))
    chains, left = [], 1.0
    for length, start in sorted(places, key=lambda place: -place[0])[:candidates]:
        grown, gains = list(tokens), [left]
        for i in range(size):
            grown.append(grown[start + i])
            gains.append(gains[-1] * HIT[min(length + i, len(HIT) - 1)])
        chains.append(Draft.chain(grown[len(tokens) :], gains[1:]))
        left *= OLDER
    return merge(chains, size)


@settings(deadline=None, max_examples=500)
@given(
    st.integers(1, 4).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=40)),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(1, 5),
)
def test_lookup_is_its_definition(tokens: list[int], size: int, least: int, more: int, candidates: int) -> None:
    (found,) = NgramDrafter(least, least + more, candidates).trees([view(tokens)], [size])
    assert found == defined(tokens, size, least, least + more, candidates)


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
    views = [view(tokens, i) for i, tokens in enumerate([[1, 2, 1, 2, 1], [5, 6, 7], [3, 3, 3]])]
    drafts = NgramDrafter().propose(views, np.array([1, 5, 3], np.int32))
    assert [drafts.row(i).tokens for i in range(3)] == [[2], [], [3, 3, 3]]
    assert drafts.q is None
    assert drafts.sources_of(0) == ["ngram"]
