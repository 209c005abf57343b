"""The index in C++ against its oracle: the same trees, to the last bit, whatever was appended and forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.drafters.lookup.datastore import END
from outpace.drafters.lookup.suffix import DOUBT, FEW, NEAREST, WEIGHTS
from tests.oracles.suffix import SuffixIndex, SuffixRows

CONSTANTS = (NEAREST, FEW, WEIGHTS, DOUBT)
TOKENS = st.integers(0, 4).flatmap(lambda v: st.lists(st.integers(END, v), max_size=60))
OPERATION = st.tuples(st.just("append"), TOKENS) | st.tuples(st.just("shrink"), st.integers(-1, 40))


@settings(deadline=None, max_examples=300)
@given(
    st.integers(2, 150),
    st.integers(2, 20),
    st.lists(st.tuples(st.integers(0, 2), OPERATION), min_size=1, max_size=10),
    st.lists(st.integers(0, 4), max_size=20),
    st.integers(0, 24),
    st.booleans(),
)
def test_the_index_is_its_oracle(
    capacity: int,
    most: int,
    operations: list[tuple[int, tuple[str, object]]],
    foreign: list[int],
    size: int,
    wide: bool,
) -> None:
    slow = [SuffixIndex(capacity, most, *CONSTANTS) for _ in range(3)]
    fast = [_native.SuffixIndex(capacity, most, *CONSTANTS) for _ in range(3)]
    for which, (name, argument) in operations:
        for index in (slow[which], fast[which]):
            getattr(index, name)(np.array(argument, np.int32) if name == "append" else argument)
        assert fast[which].tokens().tolist() == slow[which].tokens().tolist()
        assert len(fast[which]) == len(slow[which])
    for context in (slow[0].tokens()[-most:], np.array(foreign, np.int32)):
        assert fast[0].places(context) == slow[0].places(context)
        for n in range(3):
            expected = slow[0].propose(context, size, slow[1 : 1 + n], wide)
            assert fast[0].propose(context, size, fast[1 : 1 + n], wide) == expected


def test_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity=1 must be"):
        _native.SuffixIndex(1, 16, *CONSTANTS)
    with pytest.raises(ValueError, match="most=1 at least 2"):
        _native.SuffixIndex(10, 1, *CONSTANTS)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(8, 60), st.booleans(), st.booleans())
def test_rows_are_kept_as_the_oracle_keeps_them(seed: int, capacity: int, wide: bool, remembers: bool) -> None:
    """Rows grow, are taken over by other requests, and leave, all under one bound."""
    rng = np.random.default_rng(seed)
    past = SuffixIndex(capacity, 8, *CONSTANTS) if remembers else None
    fast_past = _native.SuffixIndex(capacity, 8, *CONSTANTS) if remembers else None
    slow = SuffixRows(capacity, 8, *CONSTANTS, wide, past)
    fast = _native.SuffixRows(capacity, 8, *CONSTANTS, wide, fast_past)
    texts: dict[int, tuple[int, list[int]]] = {}
    for request in range(30):
        row = int(rng.integers(0, 4))
        if row not in texts or rng.random() < 0.2:
            texts[row] = (request, [])
        texts[row][1].extend(rng.integers(0, 3, int(rng.integers(1, 9))).tolist())
        tokens = np.array(texts[row][1], np.int32)
        asked = (row, texts[row][0], min(3, len(tokens)), tokens, int(rng.integers(1, 9)))
        expected = slow.tree(*asked)
        slow.bound()
        assert fast.trees([asked]) == [(*expected, [0] * len(expected[0]))]
        if rng.random() < 0.2:
            assert slow.release(row) == fast.release(row) >= 0
            texts.pop(row)
            if past is not None and fast_past is not None:
                for history in (past, fast_past):
                    history.append(np.append(tokens, np.int32(END)))
            slow.bound()
            fast.bound()
        assert fast.rows() == slow.rows()
        assert fast.places == slow.places <= capacity
    assert slow.release(99) == fast.release(99) == -1
