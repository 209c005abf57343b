"""``attention.mixture`` as Triton kernels over the pool: the same blocks of slots in the same order.

A program has one row's tokens, with all query heads of one KV head, as a tile, and one block of slots; of these it
reads those within the row's bounds. A second kernel adds the blocks' parts in their order.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outpace.models.torch.kv import NEVER, SPLIT, Seen

PROGRAMS = 264  # that fill a card of 132 processors: where rows and heads are fewer, slots are split
PARTS = 16  # that are added at a time
TILE, WARPS = 64, 4  # slots that a program reads at a time, at most; its warps
NOTHING = tl.constexpr(NEVER)


# Sizes that differ from step to step must not make another kernel.
@triton.jit(
    do_not_specialize=["width", "length", "covered", "split"], do_not_specialize_on_alignment=["slots", "hidden"]
)
def one_block(
    query, keys, values, slots, hidden, bounds, parts, sums, scale, softcap, head_keys, head_values, asked, width,
    length, covered, split, GROUPS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, PADDED_K: tl.constexpr, PADDED_V: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Part [ROWS, DV] float32 of what tokens of one row find in one block, and the logarithm of its weights' sum."""
    tiles = tl.cdiv(width * GROUPS, ROWS)
    row, head, block = tl.program_id(0) // tiles, tl.program_id(1), tl.program_id(2)
    m = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    real = m < width * GROUPS
    token = row * width + m // GROUPS
    at = token * asked + head * GROUPS + m % GROUPS
    k, v = tl.arange(0, PADDED_K), tl.arange(0, PADDED_V)
    q = tl.load(query + at[:, None] * DK + k[None], mask=real[:, None] & (k < DK)[None], other=0.0)
    own_keys, own_values = keys + head.to(tl.int64) * head_keys, values + head.to(tl.int64) * head_values
    top = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_V], tl.float32)
    first, last = block * split, tl.minimum((block + 1) * split, length)
    if BOUNDED:
        last = tl.minimum(last, tl.load(bounds + 2 * row + 1).to(tl.int32))
        first = tl.maximum(first, tl.load(bounds + 2 * row).to(tl.int32) // TILE * TILE)
    for begin in range(first, last, TILE):  # nothing in it branches, so that loads run ahead of products
        n = begin + tl.arange(0, TILE)
        there = n < last
        seen = real[:, None] & there[None]
        if MASKED:
            known = seen & (n >= covered)[None]
            where = token[:, None].to(tl.int64) * (length - covered) + (n - covered)[None]
            seen = seen & (tl.load(hidden + where, mask=known, other=0) == 0)
        slot = tl.load(slots + row.to(tl.int64) * length + n, mask=there, other=0)[:, None]
        near = tl.load(own_keys + slot * DK + k[None], mask=there[:, None] & (k < DK)[None], other=0.0)
        scores = tl.dot(q, tl.trans(near), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(seen, scores, NOTHING)
        peak = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - peak[:, None]), 0.0)
        shrunk = tl.exp(top - peak)
        far = tl.load(own_values + slot * DV + v[None], mask=there[:, None] & (v < DV)[None], other=0.0)
        found = tl.dot(weights.to(far.dtype), far, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        mixed = mixed * shrunk[:, None] + found
        top = peak
    some = total > 0
    out = (block * tl.num_programs(0) // tiles * width).to(tl.int64) * asked + at
    whole = tl.where(some, total, 1.0)
    tl.store(parts + out[:, None] * DV + v[None], mixed / whole[:, None], mask=real[:, None] & (v < DV)[None])
    tl.store(sums + out, tl.where(some, top + tl.log(whole), NOTHING), mask=real)


@triton.jit(do_not_specialize=["blocks", "count"])
def all_blocks(
    parts, sums, sinks, out, blocks, count, asked, DV: tl.constexpr, PADDED_V: tl.constexpr, SINKS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One query head's parts of one token, ``PARTS`` at a time in the order of their blocks; a sink's share last."""
    i = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, PADDED_V)
    sink = tl.full([], NOTHING, tl.float32)
    if SINKS:
        sink = tl.load(sinks + i % asked).to(tl.float32)
    top = sink
    for begin in range(0, blocks, PARTS):
        block = begin + tl.arange(0, PARTS)
        top = tl.maximum(top, tl.max(tl.load(sums + block * count + i, mask=block < blocks, other=NOTHING), 0))
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.zeros([PADDED_V], tl.float32)
    for begin in range(0, blocks, PARTS):
        block = begin + tl.arange(0, PARTS)
        there = block < blocks
        share = tl.where(there, tl.exp(tl.load(sums + block * count + i, mask=there, other=NOTHING) - top), 0.0)
        total += tl.sum(share, 0)
        where = (block * count + i)[:, None] * DV + v[None]
        part = tl.load(parts + where, mask=there[:, None] & (v < DV)[None], other=0.0)
        mixed += tl.sum(share[:, None] * part, 0)
    if SINKS:
        total += tl.exp(sink - top)
    tl.store(out + i * DV + v, (mixed / total).to(out.dtype.element_ty), mask=v < DV)


def mixture(
    query: Tensor, keys: Tensor, values: Tensor, seen: Seen, rows: int, *, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """See ``attention.mixture``."""
    query = query.contiguous()
    (count, asked, dk), (heads, _, dv) = query.shape, values.shape
    width, length, groups = count // rows, len(seen.slots) // rows, asked // heads
    tile_rows = max(16, min(64, triton.next_power_of_2(width * groups)))
    tiles = triton.cdiv(width * groups, tile_rows)
    wide_k, wide_v = (max(16, triton.next_power_of_2(d)) for d in (dk, dv))
    tile = max(
        16, min(TILE, 16384 // (max(wide_k, wide_v) * keys.element_size()))
    )  # so that it fits into shared memory
    split = SPLIT
    if not seen.blocks:
        split = triton.cdiv(triton.cdiv(length, triton.cdiv(PROGRAMS, rows * tiles * heads)), tile) * tile
    blocks = triton.cdiv(length, split)
    parts = torch.empty((blocks, count, asked, dv), dtype=torch.float32, device=query.device)
    sums = torch.empty((blocks, count, asked), dtype=torch.float32, device=query.device)
    out = query.new_empty((count, asked, dv))
    hidden = None if seen.hidden is None else seen.hidden.view(torch.uint8)
    with torch.cuda.device_of(query):  # not the current one
        one_block[rows * tiles, heads, blocks](
            query, keys, values, seen.slots, hidden, seen.bounds, parts, sums, scale, softcap or 1.0, keys.stride(0),
            values.stride(0), asked, width, length, seen.covered, split, GROUPS=groups, ROWS=tile_rows, TILE=tile,
            DK=dk, DV=dv, PADDED_K=wide_k, PADDED_V=wide_v, MASKED=hidden is not None, CAPPED=softcap is not None,
            BOUNDED=seen.bounds is not None, num_warps=WARPS,
        )  # fmt: skip
        all_blocks[(count * asked,)](
            parts, sums, sinks, out, blocks, count * asked, asked, DV=dv, PADDED_V=wide_v,
            SINKS=sinks is not None, PARTS=1 if seen.blocks else PARTS,
        )  # fmt: skip
    return out
