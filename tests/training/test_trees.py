"""Which tree, and how much of a draft, is worth verifying: against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.learned import medusa as trees
from outpace.training.methods.parallel import best_prefix


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0.01, 1))
def test_best_prefix_against_all_lengths(rows: list[list[float]], cost: float) -> None:
    def worth(row: list[float], n: int) -> float:
        return (1 + sum(float(np.prod(row[: k + 1])) for k in range(n))) / (1 + cost * n)

    for row, length in zip(rows, best_prefix(np.array(rows), cost), strict=True):
        assert worth(row, int(length)) == pytest.approx(max(worth(row, n) for n in range(5)), rel=1e-12)


def closed_trees(heads: int, ranks: int, nodes: int) -> list[tuple[trees.Path, ...]]:
    paths = [p for d in range(1, heads + 1) for p in itertools.product(range(ranks), repeat=d)]
    return [t for t in itertools.combinations(paths, nodes) if all(len(p) == 1 or p[:-1] in t for p in t)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("measured", [False, True])
def test_search_finds_the_best_tree_of_every_size(seed: int, measured: bool) -> None:
    rng = np.random.default_rng(seed)
    ranks = rng.choice([0, 1, 2, 1 << 30], (60, 3), p=[0.4, 0.25, 0.15, 0.2])
    accuracy = np.stack([[(ranks[:, k] == r).mean() for r in range(2)] for k in range(3)])
    gain = trees.gains_of_ranks(ranks) if measured else trees.gains_of_accuracy(accuracy)
    found = trees.search(gain, 4, 3, 2)
    for nodes in range(1, 5):
        best = max(sum(map(gain, tree)) for tree in closed_trees(3, 2, nodes))
        assert sum(map(gain, found[:nodes])) == pytest.approx(best, abs=1e-12)
    assert all(parent < i for i, parent in enumerate(trees.parents(found)))
    if measured:  # the gains of a tree add up to what it accepts
        assert trees.accepted(ranks, found).mean() == pytest.approx(sum(map(gain, found)), abs=1e-12)


def test_paths_that_gain_nothing_are_left_out() -> None:
    ranks = np.array([[0, 1], [0, 1 << 30]])
    assert trees.search(trees.gains_of_ranks(ranks), 9, 2, 2) == ((0,), (0, 1))
