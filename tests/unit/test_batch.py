"""Packing new tokens of rows into a batch; test_step_stages.py compares it with what C++ packs for a step."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.models.base import Batch

NAMES = ("token", "row", "position", "parent", "starts", "wanted")


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
