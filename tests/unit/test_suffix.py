"""The suffix index against brute force; forgetting, history, and files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace._native import SuffixIndex
from outpace.common.arrays import I32
from outpace.drafters.base import RowView
from outpace.drafters.lookup.datastore import END
from outpace.drafters.lookup.suffix import DOUBT, FEW, NEAREST, WEIGHTS, SuffixDrafter
from outpace.errors import DrafterError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.exact.tree import Tree
from outpace.params import SamplingParams

SEQUENCES = st.integers(0, 4).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=90))


def ids(tokens: Iterable[int]) -> I32:
    return np.array(list(tokens), np.int32)


def new_index(capacity: int, most: int = 16) -> SuffixIndex:
    return SuffixIndex(capacity, most, NEAREST, FEW, WEIGHTS, DOUBT)


def tree_of(index: SuffixIndex, context: list[int], budget: int, wide: bool = True) -> Tree:
    found = index.propose(ids(context), budget, [], wide)
    return Tree(*found, [0] * len(found[0]))


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


def slow_gain(tokens: list[int], path: list[int], places: list[tuple[int, int]]) -> float:
    """The product along ``path`` of (votes for its next token) / (all votes and doubt)."""
    gain, longer = 1.0, tokens + path
    for depth, token in enumerate(path):
        votes = {}
        for at, length in places:
            if longer[at : at + depth] == path[:depth]:
                votes[at] = (longer[at + depth], WEIGHTS[min(length + depth, len(WEIGHTS) - 1)])
        for_it = sum(weight for said, weight in votes.values() if said == token)
        gain *= for_it / (DOUBT + sum(weight for _, weight in votes.values()))
    return gain


@settings(deadline=None, max_examples=300)
@given(SEQUENCES, st.integers(2, 20))
def test_places_are_those_of_brute_force(tokens: list[int], most: int) -> None:
    index = new_index(1000, most)
    index.append(ids(tokens))
    near = slow_places(tokens, tokens, most)
    found = index.places(ids(tokens[-most:]))
    assert found[: len(near)] == near
    assert len(found) == len(near)


@settings(deadline=None, max_examples=200)
@given(SEQUENCES, st.integers(1, 12))
def test_a_tree_has_the_paths_of_highest_probability(tokens: list[int], budget: int) -> None:
    index = new_index(1000)
    index.append(ids(tokens))
    tree = tree_of(index, tokens[-16:], budget)
    places = index.places(ids(tokens[-16:]))
    assert len(tree) <= budget
    assert tree.gains == sorted(tree.gains, reverse=True)
    assert bool(places) == bool(len(tree))
    paths: list[list[int]] = []
    for i, parent in enumerate(tree.parents):
        paths.append([*(paths[parent] if parent >= 0 else []), tree.tokens[i]])
        assert tree.gains[i] == pytest.approx(slow_gain(tokens, paths[i], places))
    assert len({tuple(path) for path in paths}) == len(paths)
    chain = tree_of(index, tokens[-16:], budget, wide=False)
    assert chain.parents == list(range(-1, len(chain) - 1))
    first = tree_of(index, tokens[-16:], 1)
    assert chain.tokens[:1] == first.tokens


def test_appending_at_once_or_one_by_one_is_the_same() -> None:
    tokens = np.random.default_rng(1).integers(0, 4, 500).tolist()
    at_once, one_by_one = new_index(120), new_index(120)
    at_once.append(ids(tokens))
    for token in tokens:
        one_by_one.append(ids([token]))
    assert tree_of(at_once, tokens[-16:], 15) == tree_of(one_by_one, tokens[-16:], 15)


def test_an_index_is_bounded_and_keeps_the_newest() -> None:
    index = new_index(100)
    for start in range(0, 1000, 10):
        index.append(ids(range(start, start + 10)))
        assert len(index) <= 100
    assert index.tokens().tolist() == list(range(1000 - len(index), 1000))
    assert len(index) >= 50


def test_one_token_over_and_over_is_drafted_on() -> None:
    index = new_index(10_000)
    index.append(ids([7] * 5000))
    assert tree_of(index, [7] * 16, 5, wide=False).tokens == [7] * 5


def test_nothing_is_matched_or_continued_across_sequences() -> None:
    index = new_index(1000)
    index.append(ids([1, 2, 3, END, 4, 5, END]))
    assert tree_of(index, [2, 3], 5) == Tree()
    assert tree_of(index, [3], 5) == Tree()
    assert tree_of(index, [1, 2], 5).tokens == [3]


# -- the drafter -----------------------------------------------------------------------------------------------------


def view(row: int, tokens: list[int], prompt: int, request: int = 0) -> RowView:
    params = SamplingParams()
    chooser = Chooser(params, Noise(0), len(tokens) - prompt)
    return RowView(row, request, np.array(tokens, np.int32), 1000, chooser, "coupled")


def propose(drafter: SuffixDrafter, *views: RowView, size: int = 4) -> Drafts:
    return drafter.propose(list(views), np.full(len(views), size, np.int32))


def test_without_history_a_released_row_leaves_nothing() -> None:
    drafter = SuffixDrafter()
    assert propose(drafter, view(0, [1, 2, 3, 1], 2)).row(0).tokens.tolist() == [2, 3, 1, 2]
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
    assert drafts.row(0).tokens.tolist() == [3]
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
    assert propose(again, view(0, [1, 2], 2)).row(0).tokens.tolist() == [3]
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
