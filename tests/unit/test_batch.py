"""Packing: the C++ and its reference give the same six arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.models.base import Batch
from tests.oracles import packing as oracle

NAMES = ("token", "row", "position", "parent", "starts", "wanted")


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, ...]:
    b = draw(st.integers(0, 5))
    tokens, trees = [], []
    for _ in range(b):
        n = draw(st.integers(0, 7))
        tokens.append(np.array(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)), np.int32))
        tree = [draw(st.integers(-1, i - 1)) for i in range(n)]
        trees.append(np.array(tree, np.int32) if draw(st.booleans()) else None)
    rows = draw(st.lists(st.integers(0, 50), min_size=b, max_size=b))
    starts_at = draw(st.lists(st.integers(0, 1000), min_size=b, max_size=b))
    wanted = draw(st.lists(st.booleans(), min_size=b, max_size=b))
    return rows, tokens, starts_at, wanted, trees, draw(st.booleans())


@settings(deadline=None, max_examples=300)
@given(batches())
def test_the_packing_in_cpp_is_its_reference(arguments: tuple[Any, ...]) -> None:
    for mine, its in zip(_native.pack_batch(*arguments), oracle.pack_batch(*arguments), strict=True):
        assert mine.dtype == its.dtype == np.int32
        assert mine.tolist() == its.tolist()


def test_a_batch_by_hand() -> None:
    tree = np.array([-1, 0, 0], np.int32)
    batch = Batch.pack(
        [4, 0, 2],
        [np.array([7, 8, 9], np.int32), np.array([5, 6], np.int32), np.array([1, 2], np.int64)[::-1]],
        [11, 0, 3],
        [True, False, True],
        [tree, None, None],
        hidden_layers=(2,),
    )
    found = [getattr(batch, name).tolist() for name in NAMES]
    assert found == [
        [7, 8, 9, 5, 6, 2, 1], [4, 4, 4, 0, 0, 2, 2], [11, 12, 12, 0, 1, 3, 4], [-1, 0, 0, -1, 0, -1, 0],
        [0, 3, 5, 7], [0, 1, 2, 5, 6],
    ]  # fmt: skip
    assert batch.hidden_layers == (2,)
    assert [batch.is_chain(b) for b in range(3)] == [False, True, True]


def test_what_is_malformed_is_refused() -> None:
    one = np.array([1], np.int32)
    for parent in ([0], [-2]):
        with pytest.raises(ValueError, match="not a node before it"):
            Batch.pack([0], [one], [0], [True], [np.array(parent, np.int32)])
    with pytest.raises(ValueError, match=r"length|shorter|longer|broadcast"):
        Batch.pack([0], [one, one], [0, 0], [True, True])
