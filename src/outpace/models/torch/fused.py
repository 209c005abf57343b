"""``between``'s functions as one Triton kernel each: a program has one token (and head), so its bits are its own."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.models.torch.between import Norm, Table

PIECE = 1024  # of an activation, a program


@triton.jit
def sum_and_norm(x, out, weight, total, normed, scale, eps, size, SIZE: tl.constexpr, NORMED: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, SIZE)
    there = i < size
    one = tl.load(x + at + i, mask=there, other=0.0).to(tl.float32)
    other = tl.load(out + at + i, mask=there, other=0.0).to(tl.float32)
    both = (one + scale * other).to(total.dtype.element_ty)
    tl.store(total + at + i, both, mask=there)
    if NORMED:
        values = both.to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        by = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
        tl.store(normed + at + i, (values * factor * by).to(normed.dtype.element_ty), mask=there)


@triton.jit
def gate_times_up(gate_up, out, size, PIECE: tl.constexpr, SILU: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = i < size
    gate = tl.load(gate_up + row * 2 * size + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + i, mask=there, other=0.0).to(tl.float32)
    if SILU:
        active = gate * tl.sigmoid(gate)
    else:  # 2 sqrt(2 / pi); tanh(x) = 2 sigmoid(2 x) - 1
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + i, (active * up).to(out.dtype.element_ty), mask=there)


@triton.jit
def heads_to_places(
    qkv, q_weight, k_weight, cos, sin, write, query, keys, values, eps, heads, kv, positions, D: tl.constexpr,
    PADDED: tl.constexpr, TURNED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PADDED)
    there = i < D
    row = qkv + (n * (heads + 2 * kv) + head) * D
    kept = tl.load(row + i, mask=there, other=0.0)
    if head < heads + kv:
        value = kept.to(tl.float32)
        across = tl.where(i < TURNED // 2, i + TURNED // 2, i - TURNED // 2)  # what it turns against
        turns = i < TURNED
        partner = tl.load(row + across, mask=turns, other=0.0).to(tl.float32)
        if NORMED:
            factor = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
            weight = q_weight if head < heads else k_weight
            value *= factor * tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
            partner *= factor * tl.load(weight + across, mask=turns, other=0.0).to(tl.float32)
            value, partner = value.to(kept.dtype).to(tl.float32), partner.to(kept.dtype).to(tl.float32)
        kept = value.to(kept.dtype)
        if TURNED > 0:
            by = tl.load(cos + n * TURNED + i, mask=turns, other=0.0)
            against = tl.load(sin + n * TURNED + i, mask=turns, other=0.0).to(tl.float32)
            product = (value * by.to(tl.float32)).to(by.dtype).to(tl.float32)
            kept = tl.where(turns, (product + partner * against).to(kept.dtype), kept)
    if head < heads:
        tl.store(query + (n * heads + head) * D + i, kept, mask=there)
    else:
        place = tl.load(write + n)
        if head < heads + kv:
            tl.store(keys + ((head - heads).to(tl.int64) * positions + place) * D + i, kept, mask=there)
        else:
            tl.store(values + ((head - heads - kv).to(tl.int64) * positions + place) * D + i, kept, mask=there)


def added(x: Tensor, out: Tensor, scale: float, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """See ``between``."""
    x, out = x.contiguous(), out.contiguous()
    total = torch.empty_like(x)
    normed = total if norm is None else torch.empty_like(x)
    weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    size = x.shape[1]
    with torch.cuda.device_of(x):
        sum_and_norm[(len(x),)](
            x, out, weight, total, normed, scale, eps, size, SIZE=triton.next_power_of_2(size),
            NORMED=norm is not None, num_warps=8 if size > 1024 else 4,
        )  # fmt: skip
    return total, normed


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See ``between``."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), size))
    with torch.cuda.device_of(gate_up):
        gate_times_up[len(gate_up), triton.cdiv(size, PIECE)](
            gate_up, out, size, PIECE=PIECE, SILU=activation == "silu"
        )
    return out


def placed(
    qkv: Tensor, heads: int, q_norm: Norm | None, k_norm: Norm | None, table: Table | None, keys: Tensor,
    values: Tensor, write: Tensor,
) -> Tensor:  # fmt: skip
    """See ``between``."""
    qkv = qkv.contiguous()
    (kv, positions, width), n = keys.shape, len(qkv)
    normed = q_norm is not None and k_norm is not None
    query = qkv.new_empty((n, heads, width))
    cos, sin = (qkv, qkv) if table is None else (each.contiguous() for each in table)
    turned = 0 if table is None else cos.shape[-1]
    with torch.cuda.device_of(qkv):
        heads_to_places[n, heads + 2 * kv](
            qkv, q_norm.weight if q_norm else qkv, k_norm.weight if k_norm else qkv, cos, sin, write, query, keys,
            values, q_norm.eps if q_norm else 0.0, heads, kv, positions, D=width, PADDED=triton.next_power_of_2(width),
            TURNED=turned, NORMED=normed, num_warps=1,
        )  # fmt: skip
    return query
