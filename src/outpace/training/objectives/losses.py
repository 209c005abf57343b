"""Losses between a target's p and a drafter's q over the same ids, a row each; and the frozen head that forms q.

``p`` and ``q`` [n, K] are probabilities. A loss is a pure function of ``p`` and the logits of q, [n]; ``slope`` is its
derivative in those logits, written out, so that a head's product and its gradient are formed block by block and
[N, V] never exists. LK: arXiv 2602.23881; total variation is one minus the acceptance of lossless verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_DECAY = 3.0  # of the hybrid's weight in the acceptance: arXiv 2602.23881
_LEAST = 1e-12


def soft_cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """-sum p log q."""
    return -(p * torch.log_softmax(logits, -1)).sum(-1)


def kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(p | q)."""
    return torch.xlogy(p, p).sum(-1) + soft_cross_entropy(logits, p)


def reverse_kl(logits: Tensor, p: Tensor) -> Tensor:
    """KL(q | p): says only what the target might say."""
    log_q = torch.log_softmax(logits, -1)
    return (log_q.exp() * (log_q - p.clamp_min(_LEAST).log())).sum(-1)


def acceptance(logits: Tensor, p: Tensor) -> Tensor:
    """sum min(p, q): how often lossless verification accepts a token drawn from q."""
    return torch.minimum(torch.softmax(logits, -1), p).sum(-1)


def total_variation(logits: Tensor, p: Tensor) -> Tensor:
    """1 - acceptance, for p and q that sum to 1."""
    return 0.5 * (torch.softmax(logits, -1) - p).abs().sum(-1)


def likelihood(logits: Tensor, p: Tensor) -> Tensor:
    """-log of the acceptance."""
    return -torch.log(acceptance(logits, p).clamp_min(_LEAST))


def hybrid(logits: Tensor, p: Tensor) -> Tensor:
    """l KL + (1 - l) TV with l = exp(-3 acceptance), which is held constant: KL while far, TV once near."""
    share = torch.exp(-_DECAY * acceptance(logits, p).detach())
    return share * kl(logits, p) + (1 - share) * total_variation(logits, p)


def expected_length(accepted: Tensor) -> Tensor:
    """[n] of acceptances [n, S] along a chain: how many drafted tokens are kept, sum over k of prod over i <= k."""
    return accepted.cumprod(-1).sum(-1)


def length_slope(accepted: Tensor) -> Tensor:
    """[n, S]: the derivative of ``expected_length``. Step s is worth the chance that it is reached, times one and what
    may follow it."""
    reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1].cumprod(-1)], -1)
    worth = torch.ones_like(accepted)
    for s in range(accepted.shape[1] - 2, -1, -1):
        worth[:, s] = 1 + accepted[:, s + 1] * worth[:, s + 1]
    return reached * worth


def _cross_entropy_slope(q: Tensor, p: Tensor) -> Tensor:
    return torch.addcmul(-p, q, p.sum(-1, keepdim=True))


def _reverse_slope(q: Tensor, p: Tensor) -> Tensor:
    apart = q.clamp_min(_LEAST).log() - p.clamp_min(_LEAST).log()
    return q * (apart - (q * apart).sum(-1, keepdim=True))


def _total_variation_slope(q: Tensor, p: Tensor) -> Tensor:
    side = 0.5 * torch.sign(q - p)
    return q * (side - (q * side).sum(-1, keepdim=True))


def _likelihood_slope(q: Tensor, p: Tensor) -> Tensor:
    below = (q < p).to(q.dtype)
    inside = q * (below - (q * below).sum(-1, keepdim=True))
    return -inside / torch.minimum(p, q).sum(-1, keepdim=True).clamp_min(_LEAST)


def _hybrid_slope(q: Tensor, p: Tensor) -> Tensor:
    share = torch.exp(-_DECAY * torch.minimum(p, q).sum(-1, keepdim=True))
    return share * _cross_entropy_slope(q, p) + (1 - share) * _total_variation_slope(q, p)


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Loss, Loss]] = {  # of (logits, p), and the slope of (q, p)
    "ce": (soft_cross_entropy, _cross_entropy_slope),
    "kl": (kl, _cross_entropy_slope),
    "reverse": (reverse_kl, _reverse_slope),
    "tv": (total_variation, _total_variation_slope),
    "lk": (likelihood, _likelihood_slope),
    "hybrid": (hybrid, _hybrid_slope),
}


def widened(logits: Tensor) -> Tensor:
    """In float32 where autocast made less of them."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


class FrozenHead(torch.autograd.Function):
    """sum of weight_i loss_i over rows, for q = softmax(hidden head^T + offset); the head learns nothing.

    Returns the sum and, without gradients, figures [n, 2]: the acceptance, and whether both agree on the likeliest id.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, h], normed
        head: Tensor,  # [K, h]
        offset: Tensor | None,  # [K]
        p: Tensor,  # [n, K]
        weight: Tensor,  # [n]
        name: str,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        _, slope = LOSSES[name]
        grads = torch.empty_like(hidden)
        figures, values = p.new_empty(len(hidden), 2), p.new_empty(len(hidden))
        device = hidden.device.type
        # Under autocast the products alone are in its type.
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        states, head = hidden.to(kind), head.to(kind)
        rows, offset = head.T, None if offset is None else offset.to(kind)
        with torch.autocast(device, enabled=False):
            for i in range(0, len(hidden), block):
                chunk = slice(i, i + block)
                state, target = states[chunk], p[chunk]
                logits = widened(state @ rows if offset is None else torch.addmm(offset, state, rows))
                q = torch.softmax(logits, -1)
                # log q at its greatest, from which the normaliser follows: a second pass of exponentials is saved.
                top = q.max(-1)
                log_total = logits.gather(1, top.indices[:, None])[:, 0] - top.values.log()
                figures[chunk, 0] = accepted = torch.minimum(q, target).sum(-1)
                figures[chunk, 1] = (top.indices == target.argmax(-1)).to(q.dtype)
                cross = log_total * target.sum(-1) - torch.linalg.vecdot(target, logits)
                values[chunk] = _value(name, cross, q, target, accepted)
                grads[chunk] = slope(q, target).to(kind) @ head
            grads *= weight[:, None]
            total = torch.dot(values, weight)
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(figures)
        return total, figures

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        return grads[0] * saved, None, None, None, None, None, None


def _value(name: str, cross: Tensor, q: Tensor, p: Tensor, accepted: Tensor) -> Tensor:
    """The loss from what is there already: its cross entropy, probabilities and acceptance."""
    if name == "ce":
        return cross
    if name == "lk":
        return -torch.log(accepted.clamp_min(_LEAST))
    if name == "tv":
        return 0.5 * (q - p).abs().sum(-1)
    if name == "reverse":
        return (torch.xlogy(q, q) - q * p.clamp_min(_LEAST).log()).sum(-1)
    divergence = torch.xlogy(p, p).sum(-1) + cross
    if name == "kl":
        return divergence
    share = torch.exp(-_DECAY * accepted)
    return share * divergence + (1 - share) * 0.5 * (q - p).abs().sum(-1)


def head_acceptance(hidden: Tensor, head: Tensor, offset: Tensor | None, p: Tensor, block: int = 256) -> Tensor:
    """[n]: the acceptance of each row, without gradients; arguments as ``FrozenHead``'s."""
    found = []
    with torch.no_grad():
        for i in range(0, len(hidden), block):
            logits = widened(hidden[i : i + block] @ head.T)
            found.append(acceptance(logits if offset is None else logits + offset, p[i : i + block]))
    return torch.cat(found) if found else p.new_empty(0)


def frozen_head_loss(
    hidden: Tensor, head: Tensor, offset: Tensor | None, p: Tensor, weight: Tensor, name: str, block: int = 256
) -> tuple[Tensor, Tensor]:
    """See ``FrozenHead``; ``block``: rows of logits that exist at once."""
    total, figures = FrozenHead.apply(hidden, head, offset, p, weight, name, block)
    return total, figures


def sequence_weights(weight: Tensor, sequence: Tensor, sequences: int, total: float = 1.0) -> Tensor:
    """``weight`` [m] scaled so that each of ``sequences`` sequences has 1 / ``sequences`` of ``total``, or nothing.

    ``sequence`` int64 [m]: which one each belongs to. Long answers would otherwise dominate, and short ones' drafts
    suffer.
    """
    sums = torch.zeros(sequences, dtype=weight.dtype, device=weight.device).index_add_(0, sequence, weight)
    return weight * (total / sequences) * (1 / sums.clamp_min(torch.finfo(weight.dtype).tiny))[sequence]


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], size: int, split: int, *tensors: Tensor) -> Any:
        wanted = ctx.needs_input_grad[3:]
        gradients = [torch.zeros_like(t) if needs else None for t, needs in zip(tensors, wanted, strict=True)]
        total, facts = tensors[0].new_zeros(()), []
        for start in range(0, len(tensors[0]), size):
            stop = start + size
            inputs = [
                (t[start:stop] if i < split else t).detach().requires_grad_(wanted[i]) for i, t in enumerate(tensors)
            ]
            with torch.enable_grad():
                loss, more = function(start, stop, *inputs)
            asked = [i for i, needs in enumerate(wanted) if needs]
            if asked:
                for i, found in zip(asked, torch.autograd.grad(loss, [inputs[i] for i in asked]), strict=True):
                    gradient = gradients[i]
                    assert gradient is not None
                    if i < split:
                        gradient[start:stop] = found
                    else:
                        gradient += found
            total += loss.detach()
            facts.append(more.detach())
        ctx.kept = gradients
        every = torch.cat(facts)
        ctx.mark_non_differentiable(every)
        return total, every

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return (None, None, None, *(None if kept is None else kept.mul_(grad) for kept in ctx.kept))


def in_chunks(
    function: Callable[..., tuple[Tensor, Tensor]], size: int, split: Sequence[Tensor], shared: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Sum ``function`` over parts of the first dimension, with one part's logits at a time.

    ``function(start, stop, *parts of split, *shared)`` gives a scalar loss and facts [n, ...] without gradient;
    ``split`` tensors [N, ...], N at least 1, are cut into parts of ``size``, ``shared`` ones go in whole. Gradients are
    formed part by part in the forward pass, so a part's logits stay near and nothing is computed twice. Differentiable
    once. Returns the sum of losses and the facts [N, ...].
    """
    total, facts = _Chunks.apply(function, size, len(split), *split, *shared)
    return total, facts
