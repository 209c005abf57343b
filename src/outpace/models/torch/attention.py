"""Attention over the pool: packed tokens in, each row against its own slots, rows of like sizes in one product.

The model runs on one sequence in which all rows' new tokens stand one after the other. Everything but attention treats
tokens one by one, so only this has to know about rows. All of a forward's indices go to the device in one copy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outpace.common.arrays import I32
from outpace.exact.drafts import ancestors
from outpace.models.base import Batch
from outpace.models.torch.kv import NEVER, SPLIT, Seen, TorchKV
from outpace.models.torch.recurrent import Step
from outpace.models.torch.upload import Upload

NAME = "outpace"
I64 = npt.NDArray[np.int64]
log = logging.getLogger(__name__)
# Dtypes that the kernel computes, and how near it comes to the reference for numbers up to 1.
CLOSE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(slots=True)
class Group:
    """B rows with up to W new tokens each.

    ``tokens`` int64 [B * W]: of the N packed ones; what a row lacks is its first one, once more. ``places`` int64
    [B * W]: the same, but N for what only fills up. ``seen``: by window.
    """

    rows: int
    tokens: torch.Tensor
    places: torch.Tensor
    seen: dict[int | None, Seen]


@dataclass(slots=True)
class Plan:
    """Who attends to what in a forward of packed ``tokens`` int64 [N] at ``positions`` int64 [N], written to ``write``
    int64 [N]. ``wanted`` int64 [M]: tokens whose logits are needed; None: all. ``real`` bool [N]: those that do not pad
    others; None: all. The forward sets ``experts``: how many it read, on average, where it counts them."""

    kv: TorchKV
    tokens: torch.Tensor
    positions: torch.Tensor
    write: torch.Tensor
    wanted: torch.Tensor | None
    groups: list[Group]
    real: torch.Tensor | None = None
    experts: torch.Tensor | None = None


def counts(batch: Batch) -> dict[int, int]:
    """New tokens of each row that has some. Raises ValueError for a row that comes twice."""
    found: dict[int, int] = {}
    for begin, end in zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True):
        if begin < end:
            row = int(batch.row[begin])
            if row in found:
                raise ValueError(f"row {row} comes twice in the batch: give its tokens together")
            found[row] = end - begin
    return found


@dataclass(slots=True)
class Row:
    """One row's share: its packed tokens ``begin .. end``, written to slots ``start`` and on, lying at ``places``."""

    begin: int
    end: int
    start: int
    positions: I32
    tree: npt.NDArray[np.bool_] | None  # [n, n] who sees whom; None: each token those before it
    places: I64

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of equal ones are computed together: what padding wastes stays under half of each."""
        return (self.end - self.begin - 1).bit_length(), (len(self.places) - 1).bit_length()

    def bounds(self, window: int | None) -> tuple[int, int]:
        """The first slot that a new token sees, and the one behind the last."""
        first = 0 if window is None else min(self.start, max(0, int(self.positions.min()) - window + 1))
        return first, len(self.places)


def row_plans(batch: Batch, kv: TorchKV, apart: bool = False) -> list[Row]:
    """Each row's share, once ``kv`` has room for the new tokens. ``apart``: a row a token, whose slots are those that
    the token sees, in the order of their positions. Raises ValueError."""
    rows = []
    for b in range(len(batch.starts) - 1):
        begin, end = int(batch.starts[b]), int(batch.starts[b + 1])
        if begin == end:
            continue
        row, n = int(batch.row[begin]), end - begin
        first, length = int(batch.position[begin]), kv.length(row)
        if first != length:
            raise ValueError(f"row {row} holds {length} positions, but its new tokens begin at position {first}")
        tree = None if batch.is_chain(b) else ancestors(batch.parent[begin:end])
        places = kv.places(row, length + n)
        if not apart:
            rows.append(Row(begin, end, length, batch.position[begin:end], tree, places))
            continue
        for i in range(n):
            seen = places[: length + i + 1]
            if tree is not None:
                seen = np.append(places[:length], places[length:][tree[i]])  # nodes follow their ancestors
            at = begin + i
            rows.append(Row(at, at + 1, len(seen) - 1, batch.position[at : at + 1], None, seen))
    return rows


def laid_out(
    rows: list[Row], firsts: list[int], size: tuple[int, int, int], window: int | None, spare: int
) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Slots [B, L] of rows, from each one's ``firsts`` on, and which of them its new tokens do not see: bool
    [B, 1, W, L]. ``size``: B, W and L; what rows lack of it is hidden, and lies at ``spare``."""
    count, width, length = size
    slots, last = np.full((count, length), spare, np.int64), np.full((count, width), -1)  # the last slot that each sees
    at, after = np.arange(length)[None, None], np.arange(width)
    for b, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        slots[b, : len(row.places) - first] = row.places[first:]
        last[b, : row.end - row.begin] = row.start - first + after[: row.end - row.begin]
    hidden = at > last[..., None]
    if window is not None:
        hidden |= at <= last[..., None] - window
    for b, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        if row.tree is None:
            continue
        n, before = row.end - row.begin, row.start - first
        hidden[b, :n, :before], hidden[b, :n, before : before + n] = False, ~row.tree
        if window is not None:
            of_slots = np.concatenate([np.arange(first, row.start, dtype=np.int32), row.positions])
            hidden[b, :n, : before + n] |= row.positions[:, None] - of_slots >= window
    return slots, hidden[:, None]


def plan(batch: Batch, kv: TorchKV, windows: tuple[int | None, ...], device: torch.device) -> Plan:
    """Who attends to what, once ``kv`` has room for the new tokens; where it has states, the step over them begins.
    Raises ValueError."""
    rows = row_plans(batch, kv)
    if kv.recurrent:
        kv.step = Step(kv.states, batch)
    alike: dict[tuple[int, int], list[Row]] = {}
    for each in rows:
        alike.setdefault(each.sizes, []).append(each)
    upload = Upload()
    tokens, positions = upload.add(batch.token), upload.add(batch.position)
    write = upload.add(np.concatenate([np.zeros(0, np.int64), *(row.places[row.start :] for row in rows)]))
    wanted = None if len(batch.wanted) == len(batch) else upload.add(batch.wanted)
    groups = [_group(group, windows, len(batch), kv.spare, upload, device) for group in alike.values()]
    sent = upload.send(device)
    return Plan(
        kv, sent[tokens], sent[positions], sent[write], None if wanted is None else sent[wanted],
        [group(sent) for group in groups],
    )  # fmt: skip


def _group(
    rows: list[Row], windows: tuple[int | None, ...], n: int, spare: int, upload: Upload, device: torch.device
) -> Callable[[torch.Tensor], Group]:
    """What makes the group, of ``n`` packed tokens' rows, from what was sent up."""
    width = max(row.end - row.begin for row in rows)
    begins, ends = np.array([[row.begin, row.end] for row in rows])[..., None].swapaxes(0, 1)
    tokens = begins + np.arange(width)
    at, places = upload.add(np.where(tokens < ends, tokens, begins)), upload.add(np.where(tokens < ends, tokens, n))
    seen: dict[int | None, tuple[slice, torch.Tensor | None, int]] = {}
    for window in windows:
        firsts, covered = [0] * len(rows), min(row.start for row in rows)  # slots before it are seen by all
        if window is not None:  # slots before are too old for all
            firsts = [row.bounds(window)[0] for row in rows]
            covered = 0
        longest = max(len(row.places) - first for row, first in zip(rows, firsts, strict=True))
        slots, hidden = laid_out(rows, firsts, (len(rows), width, longest), window, spare)
        there = torch.from_numpy(np.ascontiguousarray(hidden[..., covered:])) if hidden.any() else None
        if there is not None and device.type != "cpu":
            there = there.pin_memory().to(device, non_blocking=True)
        seen[window] = upload.add(slots), there, covered

    def made(sent: torch.Tensor) -> Group:
        return Group(len(rows), sent[at], sent[places], {w: Seen(sent[s], h, c) for w, (s, h, c) in seen.items()})

    return made


def mixed(
    layer: int,
    plan: Plan,
    query: torch.Tensor,  # [N, Hq, Dk]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]: a score that takes its share of the softmax and has no value
) -> torch.Tensor:
    """What each token finds in its row, whose new keys and values are written: [N, Hq, Dv]."""
    keys, values = plan.kv.keys[layer], plan.kv.values[layer]
    mix = _mixture(query.device, query.dtype, keys.shape[2], values.shape[2], query.shape[1] // len(keys))
    given = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if len(plan.groups) == 1 and len(plan.groups[0].tokens) == len(query):
        return mix(query, keys, values, plan.groups[0].seen[window], plan.groups[0].rows, **given)
    out = query.new_empty((len(query) + 1, query.shape[1], values.shape[2]))  # the last one of what only fills up
    for group in plan.groups:
        found = mix(query.index_select(0, group.tokens), keys, values, group.seen[window], group.rows, **given)
        out.index_copy_(0, group.places, found)
    return out[:-1]


def mixture(
    query: torch.Tensor,  # [B * W, Hq, Dk]
    keys: torch.Tensor,  # [Hkv, the pool's positions, Dk]
    values: torch.Tensor,  # [Hkv, the pool's positions, Dv]
    seen: Seen,
    rows: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What tokens of B ``rows`` find: [B * W, Hq, Dv]. The reference of the kernel, and what runs where that does not.

    Query heads that share a KV head are folded into one product: twice as fast as SDPA on a CPU at small widths.
    """
    b, w, heads, groups = rows, len(query) // rows, len(keys), query.shape[1] // len(keys)
    folded = (query * scale).view(b, w, heads, groups, -1).permute(2, 0, 3, 1, 4).reshape(heads * b, groups * w, -1)
    narrow = query.dtype == torch.bfloat16 and softcap is None and sinks is None and not seen.blocks
    slots = seen.slots.view(b, -1)
    size = SPLIT if seen.blocks else max(1, slots.shape[1])
    parts, sums = [], []
    for begin in range(0, slots.shape[1], size):
        at = slots[:, begin : begin + size].reshape(-1)
        near = keys.index_select(1, at).view(heads * b, -1, keys.shape[2])
        scores = torch.bmm(folded, near.transpose(1, 2))
        if not narrow:  # where scores only go through a softmax, that makes them floats itself
            scores = scores.float()
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        each = scores.view(heads, b, groups, w, -1)
        if seen.hidden is not None:
            each[..., seen.covered :].masked_fill_(seen.hidden[..., begin : begin + size], NEVER)
        far = values.index_select(1, at).view(heads * b, -1, values.shape[2])
        parts.append(torch.bmm(torch.softmax(scores, -1).to(far.dtype), far).view(heads, b, groups, w, -1))
        if sinks is not None or slots.shape[1] > size:
            sums.append(each.logsumexp(-1, keepdim=True))
    if sinks is not None:
        sums.append(sinks.float().view(heads, 1, groups, 1, 1).expand_as(sums[0]))
    found = parts[0]
    if sums:
        top = torch.stack(sums).amax(0)
        shares = [torch.exp(each - top) for each in sums]
        weighed = [part.float() * share for part, share in zip(parts, shares, strict=False)]  # a sink has no value
        found = (sum(weighed[1:], weighed[0]) / sum(shares[1:], shares[0])).to(found.dtype)
    return found.permute(1, 3, 0, 2, 4).reshape(b * w, heads * groups, -1)


def able(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels may run."""
    there = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return there and dtype in CLOSE and find_spec("triton") is not None


@cache
def _mixture(device: torch.device, dtype: torch.dtype, dk: int, dv: int, groups: int) -> Callable[..., torch.Tensor]:
    """What computes heads of these sizes, ``groups`` query heads to a KV head: the kernel where it runs and agrees (on
    cards, and in Triton's interpreter), the reference elsewhere."""
    if not able(device, dtype):
        return mixture
    try:
        from outpace.models.torch import kernel

        width = -(-64 // groups)  # its largest tile
        query, keys, values = (
            torch.linspace(-1, 1, n * heads * size, device=device, dtype=dtype).view(n, heads, size)
            for n, heads, size in ((width, groups, dk), (1, 64, dk), (1, 64, dv))
        )
        seen = Seen(torch.arange(64, device=device), None, 0)
        given: Any = {"scale": dk**-0.5, "softcap": None, "sinks": None}
        ours, expected = (each(query, keys, values, seen, 1, **given) for each in (kernel.mixture, mixture))
        torch.testing.assert_close(ours, expected, atol=CLOSE[dtype], rtol=0.0)
    except Exception as error:  # a compiler's, a driver's
        log.warning("the kernel for attention is off for heads of %d and %d, which costs speed: %s", dk, dv, error)
        return mixture
    return kernel.mixture


# What transformers' attention modules call


@dataclass(slots=True)
class Forward:
    """What the attention modules of one model share: the plan of the forward that runs (None: none does)."""

    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Set on an attention module as ``_outpace`` while a forward runs through it."""

    forward: Forward
    layer: int
    window: int | None  # positions that a token sees, itself among them; None: all


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, N, Dk]
    key: torch.Tensor,  # [1, Hkv, N, Dk]
    value: torch.Tensor,  # [1, Hkv, N, Dv]
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # what else the model passes was judged when it was loaded
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: writes keys and values, and returns [1, N, Hq, Dv]."""
    site: Site = module._outpace
    plan = site.forward.plan
    if plan is None or attention_mask is not None:
        raise RuntimeError("the model was called outside of forward(), or builds its own attention mask")
    plan.kv.keys[site.layer].index_copy_(1, plan.write, key[0])
    plan.kv.values[site.layer].index_copy_(1, plan.write, value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    ours = query[0].transpose(0, 1).contiguous()
    out = mixed(site.layer, plan, ours, scale=scale, window=site.window, softcap=softcap, sinks=s_aux)
    return out[None], None
