"""Training through 4-bit weights: a network computes with what Q4_1 keeps of its matrices, yet learns all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outpace.models.weights.q4_1 import BLOCK

_STEPS = 15.0  # between a block's least and its greatest value


def rounded(matrix: Tensor) -> Tensor:
    """float32 [rows, cols] as Q4_1 keeps it: the values of ``q4_1.decode(q4_1.encode(matrix))``. Other tensors, and
    matrices whose columns are no whole blocks, come back as they are."""
    if matrix.ndim != 2 or matrix.shape[1] % BLOCK:
        return matrix
    blocks = matrix.detach().reshape(len(matrix), -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    least, step = low.half().float(), ((high - low) / _STEPS).half().float()
    q = ((blocks - least) / torch.where(step > 0, step, 1.0)).round_().clamp_(0, _STEPS)
    return (least + q * step).view_as(matrix)


@contextmanager
def in_four_bits(network: nn.Module, wanted: bool) -> Iterator[None]:
    """Inside, the network computes with rounded weights if ``wanted``. Gradients are of these values and stay: a step
    by them is the straight-through estimator's (arXiv 1308.3432)."""
    params = list(network.parameters()) if wanted else []
    with replaced(params, [rounded(p.data) for p in params]):
        yield


@contextmanager
def replaced(params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, parameters have other values; what is done to these is lost."""
    own = [p.data for p in params]
    try:
        for p, value in zip(params, values, strict=True):
            p.data = value
        yield
    finally:
        for p, value in zip(params, own, strict=True):
            p.data = value
