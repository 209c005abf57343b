"""Losses by their definitions, their slopes by finite differences, the head's blocks by the plain form."""

import pytest
import torch

from outpace.training import losses


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
