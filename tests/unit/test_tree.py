"""Token trees and batches: shapes; merging and packing against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.exact.drafts import Draft, Drafts, ancestors, depths, is_chain, merge
from outpace.models.base import Batch
from tests.oracles import tree as oracle

Path = tuple[int, ...]


def paths(tree: Draft) -> list[Path]:
    found: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    tree = Draft()
    for i in range(draw(st.integers(0, 7))):
        gain = draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
        tree.add(draw(st.integers(0, 2)), draw(st.integers(-1, i - 1)), gain, draw(st.integers(0, 3)))
    return tree


def test_shapes() -> None:
    parents = np.array([-1, 0, 0, 1, -1], np.int32)
    assert depths(parents).tolist() == [0, 1, 1, 2, 0]
    assert ancestors(parents).astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 1],
    ]  # fmt: skip
    assert is_chain([])
    assert is_chain([-1, 0, 1])
    assert not is_chain([-1, -1])


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 3]])
def test_a_parent_that_does_not_come_before_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="not a node before it"):
        depths(np.array(parents, np.int32))


@settings(deadline=None, max_examples=300)
@given(st.lists(trees(), max_size=4), st.integers(0, 12))
def test_merge_is_its_definition(proposals: list[Draft], budget: int) -> None:
    gains: dict[Path, float] = {}
    for tree in proposals:
        for path, gain in zip(paths(tree), tree.gains, strict=True):
            gains[path] = max(gain, gains.get(path, 0.0))
    capped = {path: min(gains[path[:n]] for n in range(1, len(path) + 1)) for path in gains}
    merged = merge(proposals, budget)
    assert merged == oracle.merge(proposals, budget)
    found = paths(merged)
    assert len(merged) == min(budget, len(gains))
    assert len(set(found)) == len(found), "equal siblings were not merged"
    assert merged.gains == [capped[path] for path in found]
    assert merged.gains == sorted(capped.values(), reverse=True)[: len(merged)], "not the best nodes, best first"
    assert all(-1 <= parent < i for i, parent in enumerate(merged.parents))
    given_by = {(p, g, s) for t in proposals for p, g, s in zip(paths(t), t.gains, t.sources, strict=True)}
    assert all((path, gains[path], source) in given_by for path, source in zip(found, merged.sources, strict=True))


def test_the_surest_proposal_is_the_source_and_the_first_among_equals() -> None:
    merged = merge([Draft.chain([1, 2], [0.5, 0.4], 0), Draft.chain([1, 2, 3], [0.5, 0.45, 0.1], 1)], 8)
    assert (merged.tokens, merged.parents, merged.sources) == ([1, 2, 3], [-1, 0, 1], [0, 1, 1])


def test_chains_stay_chains_and_ragged_rows_are_packed() -> None:
    chain, tree = Draft.chain([4, 5], [0.9, 0.5]), Draft([1, 2], [-1, -1], [0.5, 0.25], [0, 1])
    assert Drafts.of([chain, Draft()], ("a",)).parents is None
    drafts = Drafts.of([chain, tree, Draft()], ("a", "b"))
    assert drafts.widths.tolist() == [2, 2, 0]
    assert drafts.row(0).parents == [-1, 0]
    assert drafts.row(1).children(-1) == [0, 1]
    assert drafts.sources_of(1) == ["a", "b"]
    assert drafts.confidence is not None
    assert drafts.confidence[1].tolist() == [0.5, 0.25]
    assert len(Drafts.of([], ("a",))) == 0


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
