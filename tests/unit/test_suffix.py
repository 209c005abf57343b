"""The suffix index in C++ against its oracle, and that against brute force; history, and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace import _native
from outpace.common.arrays import I32
from outpace.drafters.base import RowView
from outpace.drafters.lookup.datastore import END
from outpace.drafters.lookup.suffix import DOUBT, FEW, NEAREST, WEIGHTS, SuffixDrafter
from outpace.errors import DrafterError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams
from tests.oracles import suffix as oracle

CONSTANTS = (NEAREST, FEW, WEIGHTS, DOUBT)
TOKENS = st.integers(0, 4).flatmap(lambda v: st.lists(st.integers(END, v), max_size=60))
OPERATION = st.tuples(st.just("append"), TOKENS) | st.tuples(st.just("shrink"), st.integers(-1, 40))
SEQUENCES = st.integers(0, 4).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=90))


def ids(tokens: Iterable[int]) -> I32:
    return np.array(list(tokens), np.int32)


def slow_places(tokens: list[int], context: list[int], most: int) -> list[tuple[int, int]]:
    """Every earlier place that ends like the context, by comparing all of them. The context is its own newest place."""
    pairs, singles = [], []
    context = context[-most:]
    for at in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(len(context), at) and tokens[at - 1 - length] == context[-1 - length] != END:
            length += 1
        if length >= 2:
            pairs.append((at, length))
        elif length == 1:
            singles.append((at, 1))
    newest = [at for at in range(len(tokens), 0, -1) if tokens[at - 1] == context[-1]]
    near = pairs[: NEAREST - 1]
    if len(near) < FEW:
        few = [at for at in newest[:FEW] if at < len(tokens)]
        return near + [(at, 1) for at in few if at not in {place for place, _ in near}]
    return near


@settings(deadline=None, max_examples=300)
@given(SEQUENCES, st.integers(2, 20))
def test_places_are_those_of_brute_force(tokens: list[int], most: int) -> None:
    index = oracle.SuffixIndex(1000, most, *CONSTANTS)  # whose trees are the native index's: see below
    index.append(ids(tokens))
    near = slow_places(tokens, tokens, most)
    found = index.places(ids(tokens[-most:]))
    assert found[: len(near)] == near
    assert len(found) == len(near)


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
    slow = [oracle.SuffixIndex(capacity, most, *CONSTANTS) for _ in range(3)]
    fast = [_native.SuffixIndex(capacity, most, *CONSTANTS) for _ in range(3)]
    for which, (name, argument) in operations:
        for index in (slow[which], fast[which]):
            getattr(index, name)(np.array(argument, np.int32) if name == "append" else argument)
        assert fast[which].tokens().tolist() == slow[which].tokens().tolist()
        assert len(fast[which]) == len(slow[which])
    for context in (slow[0].tokens()[-most:], np.array(foreign, np.int32)):
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
    past = oracle.SuffixIndex(capacity, 8, *CONSTANTS) if remembers else None
    fast_past = _native.SuffixIndex(capacity, 8, *CONSTANTS) if remembers else None
    slow = oracle.SuffixRows(capacity, 8, *CONSTANTS, wide, past)
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


# -- the drafter -----------------------------------------------------------------------------------------------------


def view(row: int, tokens: list[int], prompt: int, request: int = 0) -> RowView:
    params = SamplingParams()
    chooser = Chooser(params, Noise(0), len(tokens) - prompt)
    return RowView(row, request, np.array(tokens, np.int32), 1000, chooser, "coupled")


def propose(drafter: SuffixDrafter, *views: RowView, size: int = 4) -> Drafts:
    return drafter.propose(list(views), np.full(len(views), size, np.int32))


def test_without_history_a_released_row_leaves_nothing() -> None:
    drafter = SuffixDrafter()
    assert propose(drafter, view(0, [1, 2, 3, 1], 2)).row(0).tokens == [2, 3, 1, 2]
    drafter.release(0)
    assert drafter.places == 0
    assert propose(drafter, view(0, [1], 1, request=1)).widths.tolist() == [0]
    assert propose(drafter, view(1, [2, 3], 1, request=2)).widths.tolist() == [0]


def test_rows_do_not_see_each_other() -> None:
    drafter = SuffixDrafter(history=True)
    propose(drafter, view(0, [1, 2, 3, 4], 1))
    assert propose(drafter, view(1, [1, 2], 1, request=1)).widths.tolist() == [0]


def test_history_has_outputs_but_no_prompts() -> None:
    drafter = SuffixDrafter(history=True)
    propose(drafter, view(0, [8, 9, 1, 2], 2))
    drafter.release(0, ids([8, 9, 1, 2, 3]))
    drafts = propose(drafter, view(0, [5, 1, 2], 3, request=1))
    assert drafts.row(0).tokens == [3]
    assert propose(drafter, view(1, [8], 1, request=2)).widths.tolist() == [0]


def test_what_did_not_end_well_or_never_drafted_is_not_remembered() -> None:
    drafter = SuffixDrafter(history=True)
    propose(drafter, view(0, [8, 1, 2, 3], 1))
    drafter.release(0)  # cancelled, or preempted: it may come back
    drafter.release(1, ids([8, 1, 2, 3]))  # nobody knows where its prompt ends
    assert drafter.places == 0


@pytest.mark.parametrize("history", [False, True])
def test_memory_is_bounded(history: bool) -> None:
    drafter = SuffixDrafter(history=history, memory=1 << 20)
    rng = np.random.default_rng(0)
    for request in range(6):
        rows = [view(row, rng.integers(0, 50, 900).tolist(), 10, request) for row in range(3)]
        propose(drafter, *rows)
        drafter.check([0, 1, 2])
        for row in rows:
            drafter.release(row.row, row.tokens)
        drafter.check([])
    assert (drafter.places > 0) == history


def test_history_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "history"
    drafter = SuffixDrafter(history=True, vocab=10, file=str(path))
    propose(drafter, view(0, [0, 1, 2], 1))
    drafter.release(0, ids([0, 1, 2, 3]))
    drafter.close()
    assert path.stat().st_mode & 0o077 == 0, "others may read what users were told"
    assert [p.name for p in tmp_path.iterdir()] == ["history"]
    again = SuffixDrafter(history=True, vocab=10, file=str(path))
    assert propose(again, view(0, [1, 2], 2)).row(0).tokens == [3]
    with pytest.raises(DrafterError, match="is of a model with 10 tokens, this one has 11"):
        SuffixDrafter(history=True, vocab=11, file=str(path))


@pytest.mark.parametrize("harm", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-2] + b"xx", lambda b: b"x" + b[1:]])
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path: Path, harm: object) -> None:
    drafter = SuffixDrafter(history=True, vocab=10)
    propose(drafter, view(0, [0, 1, 2, 3], 1))
    drafter.release(0, ids([0, 1, 2, 3]))
    drafter.save(tmp_path / "a")
    (tmp_path / "b").write_bytes(harm((tmp_path / "a").read_bytes()))  # type: ignore[operator]
    with pytest.raises(DrafterError, match="damaged or no suffix history: delete it"):
        drafter.load(tmp_path / "b")
    assert drafter.places == 4


def test_what_cannot_be_written_or_read_says_so(tmp_path: Path) -> None:
    drafter = SuffixDrafter(history=True)
    with pytest.raises(DrafterError, match="cannot be written"):
        drafter.save(tmp_path / "none" / "x")
    with pytest.raises(DrafterError, match="cannot be read"):
        drafter.load(tmp_path / "x")
    with pytest.raises(DrafterError, match="add history=1"):
        SuffixDrafter().save(tmp_path / "x")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"most": 1}, "max=1"), ({"most": 65}, "max=65"), ({"memory": 0}, "memory=1"), ({"file": "x"}, "add history=1")],
)
def test_options_out_of_range_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(DrafterError, match=says):
        SuffixDrafter(**options)  # type: ignore[arg-type]
