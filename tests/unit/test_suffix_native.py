"""The index in C++ against its reference: the same trees, to the last bit, whatever was appended and forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _fast
from outpace.drafters.lookup.suffix_index import DOUBT, FEW, NEAREST, WEIGHTS, SuffixIndex
from outpace.drafters.lookup.suffix_rows import SuffixRows
from outpace.drafters.lookup.votes import END

if _fast.native is None:
    pytest.skip("the extension was not built", allow_module_level=True)

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
def test_equal_to_the_reference(
    capacity: int,
    most: int,
    operations: list[tuple[int, tuple[str, object]]],
    foreign: list[int],
    size: int,
    wide: bool,
) -> None:
    slow = [SuffixIndex(capacity, most, *CONSTANTS) for _ in range(3)]
    fast = [_fast.native.SuffixIndex(capacity, most, *CONSTANTS) for _ in range(3)]
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


@pytest.mark.parametrize("kind", [SuffixIndex, _fast.native.SuffixIndex])
def test_bounds_are_refused(kind: type[SuffixIndex]) -> None:
    with pytest.raises(ValueError, match="capacity=1 must be"):
        kind(1, 16, *CONSTANTS)
    with pytest.raises(ValueError, match="most=1 at least 2"):
        kind(10, 1, *CONSTANTS)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(8, 60), st.booleans(), st.booleans())
def test_rows_are_kept_as_the_reference_keeps_them(seed: int, capacity: int, wide: bool, remembers: bool) -> None:
    """Rows grow, are taken over by other requests, and leave, all under one bound."""
    rng = np.random.default_rng(seed)
    kinds = [(SuffixIndex, SuffixRows), (_fast.native.SuffixIndex, _fast.native.SuffixRows)]
    histories = [index(capacity, 8, *CONSTANTS) if remembers else None for index, _ in kinds]
    both = [rows(capacity, 8, *CONSTANTS, wide, its) for (_, rows), its in zip(kinds, histories, strict=True)]
    texts: dict[int, tuple[int, list[int]]] = {}
    for request in range(30):
        row = int(rng.integers(0, 4))
        if row not in texts or rng.random() < 0.2:
            texts[row] = (request, [])
        texts[row][1].extend(rng.integers(0, 3, int(rng.integers(1, 9))).tolist())
        tokens = np.array(texts[row][1], np.int32)
        size = int(rng.integers(1, 9))
        slow, fast = (its.tree(row, texts[row][0], min(3, len(tokens)), tokens, size) for its in both)
        assert fast == slow
        for its in both:
            its.bound()
        if rng.random() < 0.2:
            assert both[0].release(row) == both[1].release(row) >= 0
            texts.pop(row)
            for its in histories:
                if its is not None:
                    its.append(np.append(tokens, np.int32(END)))
            for its in both:
                its.bound()
        assert both[1].rows() == both[0].rows()
        assert both[1].places == both[0].places <= capacity
    assert both[0].release(99) == both[1].release(99) == -1
