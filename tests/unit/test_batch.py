"""Packing: the shortcut for one row is the general way."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from outpace.models.base import Batch


@pytest.mark.parametrize("parents", [None, [-1, 0, 1], [-1, 0, 0], [-1, -1, 1], [-1, 0, 0, 2, 1, 4]])
def test_one_row_is_packed_as_pack_does(parents: list[int] | None) -> None:
    tokens = np.arange(7, 7 + (3 if parents is None else len(parents)), dtype=np.int32)
    quick = Batch.single(4, tokens, 11, parents, (2,))
    tree = None if parents is None else np.array(parents, np.int32)
    general = Batch.pack([4], [tokens], [11], [True], [tree], taps=(2,))
    for field in fields(Batch):
        mine, its = getattr(quick, field.name), getattr(general, field.name)
        if isinstance(its, np.ndarray):
            assert mine.dtype == its.dtype, field.name
            assert mine.tolist() == its.tolist(), field.name
        else:
            assert mine == its, field.name
