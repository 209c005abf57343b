"""Medusa: untrained heads, the loss, ranks against drafts as they are served, and the tree that follows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.learned import medusa as trees
from outpace.drafters.learned.config import tensor_shapes
from outpace.drafters.learned.medusa import filled
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.drafters.learned.picks import likeliest
from outpace.training.objectives.medusa import NEVER, MedusaObjective
from outpace.training.objectives.parallel import best_prefix
from outpace.training.options import MedusaOptions
from tests.training import small

PARTS = small.target()
HEAD = PARTS.head[small.IDS]


def objective(**options: Any) -> MedusaObjective:
    return MedusaObjective(MedusaNetwork(small.medusa_config()), PARTS, small.WORDS, MedusaOptions(**options))


def test_untrained_heads_say_what_the_target_says_next() -> None:
    given_ = small.batch([9], PARTS)
    normed = PARTS.norm(given_.states[:, -1])
    logits = (objective().network(normed) @ HEAD.T).detach().numpy()
    wanted = PARTS.logits(given_.states[:, -1], small.IDS)
    for k in range(3):
        for i, its in enumerate(logits[:, k]):
            (best,), (gain,) = likeliest(its, 1)
            assert best == int(wanted[i].argmax())
            np.testing.assert_allclose(np.exp(gain), wanted[i].softmax(-1).amax(), rtol=1e-4)


def test_it_learns_to_count_and_its_tree_is_what_it_accepts() -> None:
    made, given_ = objective(nodes=6, ranks=4), small.batch([20, 12, 9], PARTS)
    first, last = small.fit(made, given_, 40, 0.03)
    assert last < 0.6 * first
    chain = made.simulate(given_)
    tree = made.find_tree([given_])
    assert chain.tokens_per_step > 1.8
    assert made.simulate_tree(given_, tree).tokens_per_step >= chain.tokens_per_step
    assert tree[0] == (0,)
    assert len(tree) <= 6
    # Serving: the exported heads' tree, at every pending token, by the simplest comparison there is.
    _, config, tensors = made.export()
    assert {n: t.shape for n, t in tensors.items() if n not in ("d2t", "t2d")} == tensor_shapes(config)
    again = MedusaNetwork(config)
    again.load_state_dict({n: torch.from_numpy(t) for n, t in tensors.items() if n.startswith("blocks")})
    accepted = []
    for b in range(given_.sequences):
        its = small.rows(given_, b)
        tokens = given_.tokens[its].tolist()
        with torch.no_grad():
            logits = again(PARTS.norm(given_.states[its, -1])) @ HEAD.T
        grown = [filled(tree, [likeliest(h, 4) for h in its], small.WORDS.ids, len(tree)) for its in logits.numpy()]
        at_path = [dict(zip(tree, its.tokens, strict=True)) for its in grown]
        runs = [0]  # nothing is known before the first token
        for i, said in enumerate(at_path[:-1]):
            after = tokens[i + 2 :]
            right = [p for p in tree if [said[p[: d + 1]] for d in range(len(p))] == after[: len(p)]]
            runs.append(max(map(len, right), default=0))
        accepted.append(runs)
        parents = trees.parents(tree)
        assert all(its.parents == parents for its in grown)
        assert all(its.gains[i] <= its.gains[p] for its in grown for i, p in enumerate(parents) if p >= 0)
    assert small.same(made.simulate_tree(given_, tree), *small.served(given_, accepted))


def test_tokens_outside_the_draft_vocabulary_are_never_right() -> None:
    made, given_ = objective(), small.batch([12], PARTS)
    given_.tokens[6], given_.tokens[9] = 35, 0
    ranks = made.ranks(given_)
    for token in (6, 9):
        for k in range(3):
            assert ranks[token - 2 - k, k] == NEVER
    assert (ranks[11] == NEVER).all()
    assert made.loss(given_)[0].isfinite()


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
