"""What stands between a decoder's products: norms, sums, activations, rotations, and where keys and values go.

The functions here are the reference, and what a CPU runs; ``fused`` has them as one kernel each, for cards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Table = tuple[Tensor, Tensor]  # cosines and signed sines [N, 1, width] of a rotation


class Norm:
    """x / rms(x) * (weight + offset) over the last dimension, with the weight of a norm's ``module``."""

    def __init__(self, module: Any, offset: float, eps: float) -> None:
        weight = module.weight.detach()
        self.weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset if offset else weight
        self.eps, self._size = eps, len(weight)
        self._twice = self.weight.repeat(2) if weight.device.type == "cpu" else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._twice is not None and self._twice.dtype in (x.dtype, torch.float32):
            # Three kernels, where rms_norm is eight on a CPU: x beside -x has mean 0 and x's mean square as variance.
            both = torch.cat((x, -x), -1)
            return F.layer_norm(both, (2 * self._size,), self._twice, None, self.eps)[..., : self._size]
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def added(x: Tensor, out: Tensor, scale: float, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """x + scale * out, both [N, H], and that after ``norm``."""
    total = torch.add(x, out, alpha=scale)
    return total, total if norm is None else norm(total)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """[N, I] of a gate, which ``activation`` (silu, or gelu as tanh approximates it) goes over, beside [N, I]."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def placed(
    qkv: Tensor, heads: int, q_norm: Norm | None, k_norm: Norm | None, table: Table | None, keys: Tensor,
    values: Tensor, write: Tensor,
) -> Tensor:  # fmt: skip
    """Queries [N, heads, d] of a projection [N, (heads + 2 Hkv) d]; keys and values go to positions ``write`` int64
    [N] of the layer's pool [Hkv, positions, d]. Queries and keys are normed head by head, and rotated by ``table``."""
    n, kv, width = len(qkv), len(keys), keys.shape[2]
    q, k, v = qkv.view(n, -1, width).split([heads, kv, kv], 1)
    both = qkv.view(n, -1, width)[:, : heads + kv]
    if q_norm is not None and k_norm is not None:
        both = torch.cat([q_norm(q), k_norm(k)], 1)
    if table is not None:
        both = rotated(both, table)
    keys.index_copy_(1, write, both[:, heads:].transpose(0, 1))
    values.index_copy_(1, write, v.transpose(0, 1))
    return both[:, :heads]


def rotated(x: Tensor, table: Table) -> Tensor:
    """Heads [N, heads, d], the first values of each rotated half against half."""
    cos, sin = table
    width = cos.shape[-1]
    turned = x[..., :width]
    out = torch.addcmul(turned * cos, turned.roll(width // 2, -1), sin).to(x.dtype)  # OLMo's tables are float32
    return out if width == x.shape[-1] else torch.cat([out, x[..., width:]], -1)
