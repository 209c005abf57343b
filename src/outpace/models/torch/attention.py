"""Attention over the pool: packed tokens in, each row against its own slots, rows of like sizes in one product.

The model runs on one sequence in which all rows' new tokens stand one after the other. Everything but attention treats
tokens one by one, so only this has to know about rows. All of a forward's indices go to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outpace.common.arrays import I32
from outpace.exact.drafts import ancestors
from outpace.models.base import Batch
from outpace.models.torch.kv import TorchKV
from outpace.models.torch.upload import Upload

NAME = "outpace"
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one group's tokens see under one window: the pool's positions, [B * L], and who sees what.

    ``mask``: float32 [B, 1, W, slots from ``covered`` on], 0 or -inf, to add to scores; None: everybody sees all.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None
    covered: int


@dataclass(slots=True)
class Group:
    """B rows with up to W new tokens each. What a row lacks is its first token, or its first slot, once more.

    ``tokens`` int64 [B * W]: of the packed ones; ``kept``: which of these are not padding, None where all are.
    ``seen``: by window.
    """

    rows: int
    tokens: torch.Tensor
    kept: torch.Tensor | None
    packed: torch.Tensor  # where those that are kept stand
    seen: dict[int | None, Seen]


@dataclass(slots=True)
class Plan:
    """Who attends to what in a forward of packed ``tokens`` int64 [N] at ``positions`` int64 [N], written to ``write``
    int64 [N]. ``wanted`` int64 [M]: tokens whose logits are needed; None: all."""

    kv: TorchKV
    tokens: torch.Tensor
    positions: torch.Tensor
    write: torch.Tensor
    wanted: torch.Tensor | None
    groups: list[Group]


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
class _Row:
    """One row's share: its packed tokens ``begin .. end``, written to slots ``start`` and on, lying at ``places``."""

    begin: int
    end: int
    start: int
    positions: I32
    tree: npt.NDArray[np.bool_]  # [n, n] who sees whom
    places: I64

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of equal ones are computed together: what padding wastes stays under half of each."""
        return (self.end - self.begin - 1).bit_length(), (len(self.places) - 1).bit_length()

    def sees(self, window: int | None) -> npt.NDArray[np.bool_]:
        """[n, slots]: which of the row's slots its new tokens see."""
        own = np.concatenate([np.ones((self.end - self.begin, self.start), np.bool_), self.tree], axis=1)
        if window is not None:
            at = np.concatenate([np.arange(self.start, dtype=np.int32), self.positions])
            own &= self.positions[:, None] - at < window
        return own


def row_plans(batch: Batch, kv: TorchKV) -> list[_Row]:
    """Each row's share, once ``kv`` has room for the new tokens. Raises ValueError."""
    rows = []
    for b in range(len(batch.starts) - 1):
        begin, end = int(batch.starts[b]), int(batch.starts[b + 1])
        if begin == end:
            continue
        row, n = int(batch.row[begin]), end - begin
        first, length = int(batch.position[begin:end].min()), kv.length(row)
        if first != length:
            raise ValueError(f"row {row} holds {length} positions, but its new tokens begin at position {first}")
        tree = np.tri(n, dtype=np.bool_) if batch.is_chain(b) else ancestors(batch.parent[begin:end])
        rows.append(_Row(begin, end, length, batch.position[begin:end], tree, kv.places(row, length + n)))
    return rows


def plan(batch: Batch, kv: TorchKV, windows: tuple[int | None, ...], device: torch.device) -> Plan:
    """Who attends to what, once ``kv`` has room for the new tokens. Raises ValueError."""
    rows = row_plans(batch, kv)
    alike: dict[tuple[int, int], list[_Row]] = {}
    for each in rows:
        alike.setdefault(each.sizes, []).append(each)
    upload = Upload()
    tokens, positions = upload.add(batch.token), upload.add(batch.position)
    write = upload.add(np.concatenate([np.zeros(0, np.int64), *(row.places[row.start :] for row in rows)]))
    wanted = None if len(batch.wanted) == len(batch) else upload.add(batch.wanted)
    groups = [_group(group, windows, upload) for group in alike.values()]
    sent = upload.send(device)
    return Plan(
        kv, sent[tokens], sent[positions], sent[write], None if wanted is None else sent[wanted],
        [each.on(sent, device) for each in groups],
    )  # fmt: skip


@dataclass(slots=True)
class _Planned:
    """A group whose indices are on their way."""

    rows: int
    tokens: slice
    kept: slice | None
    packed: slice
    seen: dict[int | None, tuple[slice, npt.NDArray[np.bool_] | None, int]] = field(default_factory=dict)

    def on(self, sent: torch.Tensor, device: torch.device) -> Group:
        seen = {}
        for window, (slots, sees, covered) in self.seen.items():
            mask = None
            if sees is not None:
                there = torch.from_numpy(sees)
                if device.type != "cpu":
                    there = there.pin_memory().to(device, non_blocking=True)
                mask = torch.zeros(there.shape, device=device).masked_fill_(~there, -torch.inf)[:, None]
            seen[window] = Seen(sent[slots], mask, covered)
        kept = None if self.kept is None else sent[self.kept]
        return Group(self.rows, sent[self.tokens], kept, sent[self.packed], seen)


def _group(rows: list[_Row], windows: tuple[int | None, ...], upload: Upload) -> _Planned:
    width = max(row.end - row.begin for row in rows)
    tokens = np.repeat(np.array([[row.begin] for row in rows]), width, axis=1)
    real = np.zeros(tokens.shape, np.bool_)
    for b, row in enumerate(rows):
        n = row.end - row.begin
        tokens[b, :n], real[b, :n] = np.arange(row.begin, row.end), True
    kept = None if real.all() else upload.add(np.flatnonzero(real))
    planned = _Planned(len(rows), upload.add(tokens), kept, upload.add(tokens[real]))
    for window in windows:
        planned.seen[window] = _seen(rows, width, window, upload)
    return planned


def _seen(
    rows: list[_Row], width: int, window: int | None, upload: Upload
) -> tuple[slice, npt.NDArray[np.bool_] | None, int]:
    firsts = [
        0 if window is None else min(row.start, max(0, int(row.positions.min()) - window + 1)) for row in rows
    ]  # slots before are too old for all
    longest = max(len(row.places) - first for row, first in zip(rows, firsts, strict=True))
    covered = 0 if window is not None else min(row.start for row in rows)  # slots before it are seen by all
    slots = np.repeat(np.array([[row.places[0]] for row in rows]), longest, axis=1)
    sees = np.zeros((len(rows), width, longest - covered), np.bool_)
    sees[..., 0] = True  # of padding: so that its softmax is a number
    for b, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        n, end = row.end - row.begin, len(row.places) - first
        slots[b, :end] = row.places[first:]
        own = row.sees(window)[:, first:]
        sees[b, :n, : end - covered] = own[:, covered:]
        sees[b, :n, end - covered :] = False
    return upload.add(slots), None if sees.all() else sees, covered


def attention(
    layer: int,
    plan: Plan,
    query: torch.Tensor,  # [N, Hq, Dk]
    key: torch.Tensor,  # [N, Hkv, Dk]
    value: torch.Tensor,  # [N, Hkv, Dv]
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq]: a score that takes its share of the softmax and has no value
) -> torch.Tensor:
    """Write the new keys and values behind their rows and attend: [N, Hq, Dv].

    Query heads that share a KV head are folded into one product: twice as fast as SDPA on a CPU at small widths.
    """
    keys, values = plan.kv.keys[layer], plan.kv.values[layer]
    keys.index_copy_(1, plan.write, key.transpose(0, 1))
    values.index_copy_(1, plan.write, value.transpose(0, 1))
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    alone = len(plan.groups) == 1 and plan.groups[0].kept is None
    mixed = query.new_empty(0) if alone else query.new_empty((*query.shape[:2], value.shape[2]))
    for group in plan.groups:
        seen, b = group.seen[window], group.rows
        asked = query if alone else query.index_select(0, group.tokens)
        w = len(asked) // b
        folded = asked.view(b, w, heads, groups, -1).permute(2, 0, 3, 1, 4).reshape(heads * b, groups * w, -1)
        near = keys.index_select(1, seen.slots).view(heads * b, -1, keys.shape[2])
        scores = torch.bmm(folded, near.transpose(1, 2)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        each = scores.view(heads, b, groups, w, -1)
        if seen.mask is not None:
            each[..., seen.covered :] += seen.mask
        if sinks is None:
            weights = torch.softmax(scores, -1)
        else:
            own = sinks.float().view(heads, 1, groups, 1, 1).expand(*each.shape[:-1], 1)
            weights = torch.softmax(torch.cat([each, own], -1), -1)[..., :-1].reshape(scores.shape)
        far = values.index_select(1, seen.slots).view(heads * b, -1, values.shape[2])
        found = torch.bmm(weights.to(far.dtype), far).view(heads, b, groups, w, -1)
        found = found.permute(1, 3, 0, 2, 4).reshape(b * w, heads * groups, -1)
        if alone:
            return found
        mixed.index_copy_(0, group.packed, found if group.kept is None else found.index_select(0, group.kept))
    return mixed


# What transformers' attention modules call


@dataclass(slots=True)
class Forward:
    """What the attention modules of one model share: the plan of the forward that runs (None: none does)."""

    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Set on every attention module as ``_outpace``."""

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
    """``attention`` as transformers calls it; returns [1, N, Hq, Dv]."""
    site: Site = module._outpace
    if site.forward.plan is None or attention_mask is not None:
        raise RuntimeError("the model was called outside of forward(), or builds its own attention mask")
    mixed = attention(
        site.layer,
        site.forward.plan,
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=site.window,
        softcap=softcap,
        sinks=s_aux,
    )
    return mixed[None], None
