"""The unrolled network is the network that serves, step by step; its loss is the loss written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.networks.eagle import EagleNetwork, TorchEagle
from outpace.training.objectives.eagle import AnchoredAttention, initialise, unroll
from outpace.training.objectives.losses import acceptance, expected_length, soft_cross_entropy
from outpace.training.options import EagleOptions
from outpace.training.target import TargetParts
from tests.training import eagle_helpers as tiny

FLAGS = [
    {},
    {"norm_output": False, "fc_norm": False},
    {"norm_before_residual": True, "fc_norm": False, "norm_before_fc": True},
]


def anchors_of(batch, steps, keep=lambda s, every: every):
    every = torch.arange(len(batch))
    found = []
    for s in range(steps):
        its = every[every + s + 2 <= batch.ends]
        found.append(keep(s, its) if s else its)
    return found


class Beside:
    """A target of such parts, as far as ``TorchEagle`` asks."""

    def __init__(self, parts):
        self.parts, self._of = self, parts

    def embed(self, tokens):
        return self._of.embed(torch.as_tensor(tokens).long())

    def head_of(self, ids):
        rows = self._of.head[torch.from_numpy(ids).long()]
        return lambda normed: normed @ rows.T


def serving(net, parts, ids):
    """The torch runtime with the network's weights, whose draft vocabulary is ``ids``."""
    tensors = {name: value.detach().numpy() for name, value in net.state_dict().items()}
    config = replace(net.config, draft_vocab=len(ids))
    return TorchEagle(Beside(parts), Checkpoint("eagle", config, tensors | {"d2t": ids.numpy() - np.arange(len(ids))}))


def served(runtime, batch, sequence, anchor, steps):
    """Logits [steps, D] after real entries up to ``anchor`` of one sequence, one entry at a time from there."""
    first, n = batch.starts[sequence], anchor + 1
    tokens = batch.tokens[first : batch.starts[sequence + 1]].numpy().astype(np.int32)
    runtime.kv.release(0)
    logits, given = runtime.extend([0], [tokens[1 : n + 1]], [batch.states[first : first + n, :-1].detach()])
    found = [logits[0]]
    for s in range(1, steps):
        logits, given = runtime.extend([0], [tokens[n + s : n + s + 1]], given)
        found.append(logits[0])
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("flags", FLAGS)
def test_unrolled_is_served(flags):
    net, parts, batch = tiny.network(**flags), tiny.parts(), tiny.batch()
    anchors = anchors_of(batch, 3, lambda s, every: every[::2].contiguous())
    anchors[2] = anchors[2][torch.isin(anchors[2], anchors[1])]
    outputs = unroll(net, batch.states[:, :-1], parts.embed(batch.tokens), batch.position, batch.starts, anchors)
    compared, ids = 0, torch.arange(0, tiny.VOCAB, 3)
    runtime = serving(net, parts, ids)
    with torch.no_grad():
        for s, at in enumerate(anchors):
            for i, anchor in enumerate(at.tolist()):
                sequence = int(batch.sequence[anchor])
                wanted = served(runtime, batch, sequence, anchor - batch.starts[sequence], s + 1)[s]
                torch.testing.assert_close(outputs[s][i] @ parts.head[ids].T, wanted, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > 40


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 2), st.integers(0, 99))
def test_attention_slopes(lengths, own, seed):
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)

    n = sum(lengths)
    kept = torch.rand(n, generator=draw) < 0.7
    at = torch.nonzero(kept).flatten()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    outer = torch.searchsorted(at, bounds).tolist()
    spans = list(zip(outer, outer[1:], bounds.tolist(), bounds.tolist()[1:], strict=False))
    given_ = noise(len(at), 4, 4), noise(n, 2, 4), noise(n, 2, 4), noise(len(at), own, 2, 4), noise(len(at), own, 2, 4)
    assert torch.autograd.gradcheck(lambda *its: AnchoredAttention.apply(*its, spans, at), given_, fast_mode=True)


@pytest.mark.parametrize(
    "options", [EagleOptions(share=1, **more) for more in ({}, {"steps_ttt": 1}, {"steps_ttt": 2, "decay": 0.5})]
)
def test_loss_is_the_mean_over_sequences(options):
    made, batch = tiny.objective(options), tiny.batch(first=[4, 0, 3])
    value, _ = made.loss(batch)
    net, parts = made.network, made.target
    anchors = anchors_of(batch, options.steps_ttt)
    outputs = unroll(net, batch.states[:, :-1], parts.embed(batch.tokens), batch.position, batch.starts, anchors)
    wanted, weights = 0.0, sum(options.decay**s for s in range(options.steps_ttt))
    for s, (at, normed) in enumerate(zip(anchors, outputs, strict=True)):
        for b in range(batch.sequences):
            losses = []
            for i, anchor in enumerate(at.tolist()):
                place = anchor + s + 1
                inside = batch.starts[b] <= anchor < batch.starts[b + 1]
                if not inside or not batch.loss_mask[place] or batch.tokens[place + 1] not in made.draft_head.ids:
                    continue
                p = torch.softmax(parts.logits(batch.states[place : place + 1, -1], made.draft_head.ids), -1)
                losses.append(soft_cross_entropy(normed[i : i + 1] @ parts.head[made.draft_head.ids].T, p))
            if losses:
                wanted = wanted + options.decay**s / weights * torch.cat(losses).mean() / batch.sequences
    torch.testing.assert_close(value, wanted, atol=1e-5, rtol=1e-5)
    value.backward()
    mine = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    wanted.backward()
    for a, b in zip(mine, net.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("steps", [1, 3])
def test_expected_length_is_the_plain_form(steps):
    """Value and gradient, of chains that end where a word is unknown, with what is not an answer left out."""
    made, batch = tiny.objective(EagleOptions(loss="length", share=1, steps_ttt=steps)), tiny.batch(first=[4, 0, 3])
    value, figures = made.loss(batch)
    net, parts, ids = made.network, made.target, made.draft_head.ids
    anchors = anchors_of(batch, steps)
    outputs = unroll(net, batch.states[:, :-1], parts.embed(batch.tokens), batch.position, batch.starts, anchors)
    lengths, ended = [[] for _ in range(batch.sequences)], 0
    for anchor in anchors[0].tolist():
        accepted = []
        for s, (at, normed) in enumerate(zip(anchors, outputs, strict=True)):
            here, place = torch.nonzero(at == anchor).flatten(), anchor + s + 1
            if not len(here) or not batch.loss_mask[place] or batch.tokens[place + 1] not in ids:
                ended += bool(accepted)
                break
            p = torch.softmax(parts.logits(batch.states[place : place + 1, -1], ids), -1)
            accepted.append(acceptance(normed[here] @ parts.head[ids].T, p))
        if accepted:
            lengths[int(batch.sequence[anchor])].append(expected_length(torch.cat(accepted)))
    wanted = sum(1 - torch.stack(its).mean() / steps for its in lengths if its) / batch.sequences
    assert steps == 1 or ended > 3
    torch.testing.assert_close(value, wanted)
    assert set(figures) == {f"{name}{s}" for s in range(steps) for name in ("accept", "agree")}
    value.backward()
    mine = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    wanted.backward()
    for a, b in zip(mine, net.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-6, rtol=1e-3)


def test_all_rows_are_candidates_when_as_many_are_asked_for():
    batch = tiny.batch()
    whole, _ = tiny.objective(EagleOptions(share=1, candidates=24)).loss(batch)
    plain, _ = tiny.objective(EagleOptions(share=1, candidates=0)).loss(batch)
    assert whole.item() == plain.item()


def test_simulation_walks_as_serving_does():
    """Against the plain loop: draft from each committed length, keep what is right, go on."""
    made, batch = tiny.objective(EagleOptions(depth=3)), tiny.batch((14, 11), first=[3, 5])
    ids, net, parts = made.draft_head.ids, made.network, made.target
    # A head that is right now and then: of two tokens only.
    batch.tokens[:] = ids[batch.tokens % 2]
    made.draft_head.ids, made.draft_head.head = ids[:2], made.draft_head.head[:2]
    found = made.simulate(batch)
    runtime = serving(net, parts, made.draft_head.ids)
    steps = tokens = 0
    with torch.no_grad():
        for b in range(batch.sequences):
            said = batch.tokens[batch.starts[b] : batch.starts[b + 1]].tolist()
            at = [3, 5][b]
            while at + 2 < len(said):
                depth = min(3, len(said) - at - 2)
                drafted = made.draft_head.ids[served(runtime, batch, b, at, depth).argmax(-1)].tolist()
                right = 0
                while right < depth and drafted[right] == said[at + 2 + right]:
                    right += 1
                gained = min(right + 1, len(said) - at - 2)
                steps, tokens, at = steps + 1, tokens + gained, at + gained
    assert (found.steps, found.tokens) == (steps, tokens)
    assert tokens > steps


def test_what_fc_is_fitted_to_survives_a_norm_that_undoes_outliers():
    """Some numbers of the target's last states are ten thousand times others, and its final norm makes them even."""
    draw = torch.Generator().manual_seed(5)
    head = torch.randn(tiny.VOCAB, tiny.HIDDEN, generator=draw)
    final_norm = torch.logspace(-2, 2, tiny.HIDDEN)
    target = TargetParts(torch.randn(tiny.VOCAB, tiny.HIDDEN, generator=draw), 1.0, head, final_norm, 1e-5)
    tokens = torch.arange(96) % 12  # fewer than a state has numbers, so that a linear map can tell them apart
    hidden_states = torch.randn(3, 12, tiny.HIDDEN, generator=draw)[:, tokens].transpose(0, 1)
    last = head[(tokens + 1) % 12] / final_norm
    states = torch.cat([hidden_states, last[:, None]], 1)
    net = EagleNetwork(tiny.config())
    initialise(net, "next", None, target, [states], seed=0)
    entries = torch.arange(len(tokens) - 1)
    with torch.no_grad():
        (said,) = unroll(
            net, hidden_states, target.embed(tokens), torch.arange(len(tokens)), (0, len(tokens)), [entries]
        )
    agree = ((said @ head.T).argmax(-1) == (tokens[entries] + 2) % 12).float().mean()
    assert agree > 0.5  # 0.08 where the noise is as large in all numbers before the norm
