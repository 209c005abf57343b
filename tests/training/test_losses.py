"""Losses by their definitions, slopes by finite differences; blocks of a head and chunks of rows by the plain form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.training.objectives import losses
from outpace.training.objectives.losses import in_chunks, sequence_weights
from outpace.training.target import DraftHead, DraftVocabulary, TargetParts


def pair(n=6, k=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=draw, dtype=torch.float64) * 2
    p = torch.softmax(torch.randn(n, k, generator=draw, dtype=torch.float64) * 2, -1)
    return logits, p


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_slope_is_the_derivative(name):
    loss, slope = losses.LOSSES[name]
    logits, p = pair()
    logits.requires_grad_()
    (wanted,) = torch.autograd.grad(loss(logits, p).sum(), logits)
    torch.testing.assert_close(slope(torch.softmax(logits, -1).detach(), p), wanted)
    if name != "hybrid":  # whose weight is held constant
        assert torch.autograd.gradcheck(lambda z: loss(z, p), logits)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
@pytest.mark.parametrize("block", [2, 64])
def test_frozen_head_is_the_plain_form(name, block):
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    head, offset = torch.randn(7, 4, generator=draw, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    _, p = pair(5)
    weight = torch.rand(5, generator=draw, dtype=torch.float64)
    value, figures = losses.frozen_head_loss(hidden, head, offset, p, weight, name, block)
    loss, _ = losses.LOSSES[name]
    logits = hidden @ head.T + offset
    wanted = (loss(logits, p) * weight).sum()
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(figures[:, 0], losses.acceptance(logits, p).detach())
    assert figures[:, 1].tolist() == (logits.argmax(-1) == p.argmax(-1)).double().tolist()
    (mine,) = torch.autograd.grad(value * 3, hidden)
    (theirs,) = torch.autograd.grad(wanted * 3, hidden)
    torch.testing.assert_close(mine, theirs)


def test_known_values():
    logits, p = pair()
    q = torch.softmax(logits, -1)
    torch.testing.assert_close(losses.total_variation(logits, p), 1 - losses.acceptance(logits, p))
    same = p.log()
    torch.testing.assert_close(losses.kl(same, p), torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(losses.soft_cross_entropy(logits, q), -(q * q.log()).sum(-1))
    accepted = torch.tensor([[0.5, 0.25, 1.0]], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        losses.expected_length(accepted), torch.tensor([0.5 + 0.125 + 0.125], dtype=torch.float64)
    )
    assert torch.autograd.gradcheck(losses.expected_length, accepted)
    many = torch.rand(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    many[0, 1], many[1] = 0, 1  # where a quotient of products would fail, and where it would not show
    (wanted,) = torch.autograd.grad(losses.expected_length(many.requires_grad_()).sum(), many)
    torch.testing.assert_close(losses.length_slope(many.detach()), wanted)


def normal(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(*shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return first, second


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 23), st.integers(1, 9), st.integers(0, 99))
def test_chunks_change_neither_loss_nor_gradient(rows: int, size: int, seed: int) -> None:
    x, weights = (t.requires_grad_() for t in normal(seed, rows, 4))
    shared = normal(seed + 1, 6, 4)[0].requires_grad_()

    def piece(start: int, stop: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w, m = tensors
        each = ((x * w) @ m.T).logsumexp(-1)
        return (each * torch.arange(rows)[start:stop]).sum(), each

    total, facts = in_chunks(piece, size, (x, weights), (shared,))
    found = torch.autograd.grad(2 * total, (x, weights, shared))
    whole, each = piece(0, rows, x, weights, shared)
    torch.testing.assert_close(total, whole.detach())
    torch.testing.assert_close(facts, each.detach())
    torch.testing.assert_close(found, torch.autograd.grad(2 * whole, (x, weights, shared)))
    assert not facts.requires_grad


def test_sequences_weigh_the_same() -> None:
    weight = torch.tensor([1.0, 1.0, 2.0, 3.0, 0.0])
    found = sequence_weights(weight, torch.tensor([0, 0, 0, 2, 3]), 4)
    assert found.tolist() == pytest.approx([0.0625, 0.0625, 0.125, 0.25, 0.0])


def test_candidates_stand_for_all() -> None:
    """Drawn ones weigh as many as they stand for, so that a sum over candidates is right on average."""
    words = DraftVocabulary.of(np.arange(2, 42), 50)
    counts = np.arange(50, dtype=np.int64)
    tokens = torch.tensor([0, 3, 3, 45, 7])
    rows = torch.rand(50, 1, generator=torch.Generator().manual_seed(1))
    parts = TargetParts(rows, 1.0, rows, torch.ones(1), 1e-5)
    for every in (0, 40):
        drawn = DraftHead(parts, words, counts, every).draw(tokens, torch.Generator())
        assert (drawn.chosen, drawn.offset) == (None, None)
        assert torch.equal(drawn.head, rows[2:42])
    sums, made = [], DraftHead(parts, words, counts, 16)
    for seed in range(300):
        drawn = made.draw(tokens, torch.Generator().manual_seed(seed))
        assert drawn.chosen is not None
        assert drawn.offset is not None
        assert len(drawn.chosen) == 16
        assert {1, 5, 36, 37, 38, 39} <= set(drawn.chosen.tolist())  # what is said, and what is said most
        assert torch.equal(drawn.head, made.head[drawn.chosen])
        sums.append(float((drawn.head[:, 0] * drawn.offset.exp()).sum()))
    assert np.mean(sums) == pytest.approx(float(made.head.sum()), rel=0.02)
