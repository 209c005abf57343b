"""Proposals are checked before they are verified, in C++ as in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.exact.drafts import Drafts, check_drafts
from tests.oracles.packing import draft_fault


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_the_check_is_its_oracle(data: st.DataObject) -> None:
    b, w = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
    tokens = np.array([[data.draw(st.integers(-1, 9)) for _ in range(w)] for _ in range(b)], np.int32).reshape(b, w)
    parents = np.array([[data.draw(st.integers(-2, n)) for n in range(w)] for _ in range(b)], np.int32).reshape(b, w)
    widths = np.array([data.draw(st.integers(-1, w + 1)) for _ in range(b)], np.int32)
    most = data.draw(st.lists(st.integers(0, 5), min_size=b, max_size=b + data.draw(st.integers(0, 1))))
    arguments = (tokens, widths, data.draw(st.sampled_from([None, parents])), most, 9)
    assert _native.draft_fault(*arguments) == draft_fault(*arguments)


@pytest.mark.parametrize(
    ("tokens", "parents", "most", "said"),
    [
        ([1, 2], None, [1], "proposed \\[2\\] nodes where \\[1\\]"),
        ([1, 9], None, [2], "not in the vocabulary of 9"),
        ([1, -1], None, [2], "not in the vocabulary of 9"),
        ([1, 2], [0, -1], [2], "before its parent"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    tokens: list[int], parents: list[int] | None, most: list[int], said: str
) -> None:
    above = None if parents is None else np.array([parents], np.int32)
    drafts = Drafts(np.array([tokens], np.int32), np.array([len(tokens)], np.int32), above)
    with pytest.raises(ValueError, match=said):
        check_drafts(drafts, most, 9)
    check_drafts(Drafts.chains([[1, 8]]), [2], 9)
