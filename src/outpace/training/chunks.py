"""Sums of losses without ever holding all logits, for heads with parts that learn (``losses.FrozenHead``: for one that
does not), and what a sequence weighs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
