"""Block-parallel drafting: training's packed forward against drafting, row by row; the loss; what is exported."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.learned.config import tensor_shapes
from outpace.drafters.learned.networks.parallel import BlockDraft, Context, ParallelNetwork
from outpace.errors import ParameterError
from outpace.training.objective import TrainBatch
from outpace.training.objectives.parallel import ParallelObjective, best_prefix
from outpace.training.options import ParallelOptions
from tests.training import small

PARTS = small.target()
HEAD = PARTS.head[small.IDS]


def objective(seed: int = 0, options: ParallelOptions | None = None, **changed: Any) -> ParallelObjective:
    network = ParallelNetwork(small.parallel_config(**changed), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():  # nothing at zero, so that every part shows
            p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    return ParallelObjective(network, PARTS, small.WORDS, options or ParallelOptions())


def draft(network: ParallelNetwork, tokens: list[int], positions: list[int], contexts: list[Context]) -> BlockDraft:
    anchors = torch.tensor(tokens)
    with torch.no_grad():
        block = network.logits(anchors, torch.tensor(positions), contexts, PARTS.embed, lambda x: x @ HEAD.T)
    return network.decide(anchors, *block, small.IDS)


def grown(network: ParallelNetwork, given_: TrainBatch, b: int) -> list[Context]:
    """Row b's context before each of its positions, one position after the other."""
    states, context = (
        given_.states[small.rows(given_, b), :-1],
        network.context(given_.states[:0, :-1], torch.arange(0)),
    )
    found = [context]
    for p in range(len(states)):
        more = network.context(states[p : p + 1], torch.tensor([p]))
        context = [(torch.cat((k, a)), torch.cat((v, c))) for (k, v), (a, c) in zip(context, more, strict=True)]
        found.append(context)
    return found


@pytest.mark.parametrize(
    "changed",
    [{}, {"sample_from_anchor": False, "confidence_markov": False, "decoder": small.decoder()}],
    ids=["ours", "other makers'"],
)
@settings(max_examples=3, deadline=None)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_training_sees_what_drafting_sees(changed: dict[str, Any], lengths: list[int], seed: int) -> None:
    """Blocks of a packed batch, all at once, against one context grown piece by piece and one block at its end."""
    made = objective(seed, **changed)
    given_ = small.batch(lengths, PARTS, seed)
    at = torch.cat([torch.arange(start, stop) for start, stop in pairwise(given_.starts)])
    with torch.no_grad():
        packed = made._normed(given_, at)
        together = made._draft(given_, at)
        for b in range(len(lengths)):
            for p, context in enumerate(grown(made.network, given_, b)[:-1]):
                row = given_.starts[b] + p
                alone = draft(made.network, [int(given_.tokens[row])], [p], [context])
                base = packed[row] @ HEAD.T
                before = torch.cat((given_.tokens[row : row + 1], alone.tokens[0, :-1]))
                assert made.network.markov_head is not None
                forced = base + made.network.markov_head.markov_w2(made.network.markov_head.markov_w1(before))
                torch.testing.assert_close(forced, alone.logits[0], atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(together.confidence[row], alone.confidence[0], atol=1e-5, rtol=1e-4)
                assert together.tokens[row].tolist() == alone.tokens[0].tolist()


def test_rows_of_a_draft_do_not_see_each_other() -> None:
    network, given_ = objective().network, small.batch([9, 5], PARTS)
    contexts = [grown(network, given_, b)[n] for b, n in enumerate((8, 3))]
    anchors = [int(given_.tokens[given_.starts[b] + n]) for b, n in enumerate((8, 3))]
    both = draft(network, anchors, [8, 3], contexts)
    for b, n in enumerate((8, 3)):
        alone = draft(network, anchors[b : b + 1], [n], contexts[b : b + 1])
        torch.testing.assert_close(both.logits[b : b + 1], alone.logits, atol=1e-5, rtol=1e-4)
        assert both.tokens[b].tolist() == alone.tokens[0].tolist()


def test_the_markov_head_reads_the_token_before() -> None:
    """A head that says "what was before, plus one" makes a block count up, whatever the rest says."""
    network = objective(markov_rank=small.VOCAB).network
    assert network.markov_head is not None
    with torch.no_grad():
        network.markov_head.markov_w1.weight.copy_(torch.eye(small.VOCAB))
        network.markov_head.markov_w2.weight.zero_()
        for token in range(1, 30):
            network.markov_head.markov_w2.weight[token, token] = 1e4  # draft id of token + 1
    context = grown(network, small.batch([6], PARTS), 0)[3]
    assert draft(network, [7], [3], [context]).tokens.tolist() == [[8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("changed", "options"),
    [({}, {}), ({"markov_rank": 0, "confidence": False}, {"length": 1.0, "cross_entropy": 0.5})],
    ids=["all heads", "block alone, expected length"],
)
def test_it_learns_to_count(changed: dict[str, Any], options: dict[str, Any]) -> None:
    made = objective(options=ParallelOptions(anchors=1.0, **options), **changed)
    given_ = small.batch([20, 12], PARTS)
    first, last = small.fit(made, given_, 60, 0.02)
    assert last < 0.4 * first
    found = made.simulate(given_)
    assert found.tokens_per_step > 3
    assert found.acceptance[0] > 0.8
    if not changed:  # cheap to verify: nearly all is sent; dear: nothing, and a token a step is what is left
        cheap, sent, starts = made.simulate_prefixes(given_, 0.01)
        dear, none, _ = made.simulate_prefixes(given_, 100.0)
        assert cheap.tokens_per_step > 0.9 * found.tokens_per_step
        assert sent > 2 * starts > none == 0
        assert dear.tokens_per_step == 1


def test_simulation_is_what_serving_would_do() -> None:
    made, given_ = objective(3), small.batch([17, 9], PARTS)
    small.fit(made, given_, 15, 0.02)  # some drafts are right, others are not
    accepted, cut = [], []
    with torch.no_grad():
        for b in range(2):
            tokens = given_.tokens[small.rows(given_, b)].tolist()
            drafts = [
                draft(made.network, [tokens[p]], [p], [c]) for p, c in enumerate(grown(made.network, given_, b)[:-1])
            ]
            runs = []
            for p, its in enumerate(drafts):
                pairs = zip(its.tokens[0].tolist(), tokens[p + 1 :], strict=False)
                runs.append(int(np.cumprod([a == b for a, b in pairs]).sum()))
            accepted.append(runs)
            prefixes = best_prefix(torch.cat([its.confidence for its in drafts]).numpy(), 0.1)
            cut.append([min(run, int(most)) for run, most in zip(runs, prefixes, strict=True)])
    found = made.simulate(given_)
    assert small.same(found, *small.served(given_, accepted))
    assert 1 < found.tokens_per_step < 5
    assert small.same(made.simulate_prefixes(given_, 0.1)[0], *small.served(given_, cut))


def test_anchors_come_from_every_sequence_and_follow_the_seed() -> None:
    made, given_ = objective(options=ParallelOptions(anchors=0.5)), small.batch([20, 12, 4], PARTS)
    first = made.anchors(given_)
    assert made.anchors(given_).tolist() == first.tolist() != made.anchors(replace(given_, seed=9)).tolist()
    assert given_.loss_mask[first].all()
    counts = [int(given_.loss_mask[small.rows(given_, b)].sum()) for b in range(3)]
    assert torch.bincount(given_.sequence[first]).tolist() == [-(-c // 2) for c in counts]


def test_a_loss_is_the_mean_of_its_sequences_losses() -> None:
    made, given_ = objective(options=ParallelOptions(anchors=1.0)), small.batch([11, 6], PARTS)
    alone = []
    for b in range(2):
        its = small.rows(given_, b)
        one = TrainBatch(
            given_.tokens[its],
            (0, its.stop - its.start),
            given_.position[its],
            given_.weight[its],
            given_.states[its],
        )
        alone.append(made.loss(one)[0])
    torch.testing.assert_close(made.loss(given_)[0], sum(alone) / 2)


def test_export_is_what_a_checkpoint_holds() -> None:
    made = objective()
    method, config, tensors = made.export()
    assert method == "parallel"
    assert {n: t.shape for n, t in tensors.items() if n not in ("d2t", "t2d")} == tensor_shapes(config)
    assert (tensors["d2t"] + np.arange(len(small.WORDS))).tolist() == np.flatnonzero(tensors["t2d"]).tolist()


def test_options_are_checked() -> None:
    wrong: list[dict[str, Any]] = [{"anchors": 0.0}, {"slope": 0.0}, {"l1": -1.0}, {"confidence_of": "luck"}]
    for changed in wrong:
        with pytest.raises(ParameterError, match=next(iter(changed))):
            ParallelOptions(**changed).check()
