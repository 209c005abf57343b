"""The index in C++ against its reference: the same trees, to the last bit, whatever was appended and forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.lookup.suffix_index import SuffixIndex
from outpace.drafters.lookup.votes import END

pytest.importorskip("outpace.drafters.lookup.suffix_native", exc_type=ImportError)  # no extension, or an older one
from outpace.drafters.lookup.suffix_native import NativeSuffixIndex

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
    slow = [SuffixIndex(capacity, most) for _ in range(3)]
    fast = [NativeSuffixIndex(capacity, most) for _ in range(3)]
    for which, (name, argument) in operations:
        for index in (slow[which], fast[which]):
            getattr(index, name)(argument)
        assert fast[which].tokens == slow[which].tokens
        assert len(fast[which]) == len(slow[which])
    for context in (slow[0].tokens[-most:], foreign):
        assert fast[0].places(context) == slow[0].places(context)
        for n in range(3):
            expected = slow[0].propose(context, size, slow[1 : 1 + n], wide)
            assert fast[0].propose(context, size, fast[1 : 1 + n], wide) == expected


def test_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity=1 must be"):
        NativeSuffixIndex(1)
    with pytest.raises(ValueError, match="most=1 at least 2"):
        NativeSuffixIndex(10, 1)
