"""Packing: the shortcut for one row is the general way."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from outpace.models.base import Batch


def test_one_chain_is_packed_as_pack_does() -> None:
    tokens = np.array([7, 3, 9], np.int32)
    quick, general = Batch.chain(4, tokens, 11, (2,)), Batch.pack([4], [tokens], [11], [True], taps=(2,))
    for field in fields(Batch):
        mine, its = getattr(quick, field.name), getattr(general, field.name)
        if isinstance(its, np.ndarray):
            assert mine.dtype == its.dtype, field.name
            assert mine.tolist() == its.tolist(), field.name
        else:
            assert mine == its, field.name
