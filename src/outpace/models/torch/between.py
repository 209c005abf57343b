"""What stands between a decoder's products: norms, sums, activations, rotations, and where keys and values go.

The functions here are the reference, and what a CPU runs; ``fused`` has them as one kernel each, for cards.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.models.torch.attention import CLOSE, able

log = logging.getLogger(__name__)
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


@cache
def between(device: torch.device, dtype: torch.dtype) -> Any:
    """What has ``added``, ``gated`` and ``placed``: ``fused`` where it runs and agrees with this module, which is what
    runs elsewhere."""
    import outpace.models.torch.between as reference

    if not able(device, dtype):
        return reference
    try:
        from outpace.models.torch import fused

        for ours, expected in zip(_tried(fused, device, dtype), _tried(reference, device, dtype), strict=True):
            torch.testing.assert_close(ours, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    except Exception as error:  # a compiler's, a driver's
        log.warning("the kernels between products are off, which costs speed: %s", error)
        return reference
    return fused


def _tried(module: ModuleType, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    def line(*size: int) -> Tensor:
        return torch.linspace(-1, 1, torch.Size(size).numel(), device=device, dtype=dtype).view(size)

    norm = Norm(torch.nn.RMSNorm(96, device=device, dtype=dtype), 0.5, 1e-6)
    found = [*module.added(line(3, 96), line(3, 96), 0.5, norm), module.gated(line(3, 128), "silu")]
    found.append(module.gated(line(3, 128), "gelu"))
    keys, values, write = line(2, 8, 96), line(2, 8, 96), torch.tensor([5, 1, 2], device=device)
    table = line(3, 1, 64), line(3, 1, 64)
    return [*found, module.placed(line(3, 8 * 96), 4, norm, norm, table, keys, values, write), keys, values]
