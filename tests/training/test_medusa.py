"""Medusa: untrained heads, the loss, ranks against drafts as they are served, and the tree that follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outpace.drafters.learned import medusa as trees
from outpace.drafters.learned.configs import tensor_shapes
from outpace.drafters.learned.medusa import filled
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.drafters.learned.picks import likeliest
from outpace.training.methods.medusa import NEVER, MedusaObjective
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
