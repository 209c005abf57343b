"""EAGLE-3 in torch (arXiv 2503.01840), on the module that is trained; on the CPU and on cards.

One layer, so what stands behind an entry needs no more of it than its key and value: attention, feed-forward and head
are computed for a row's last entry and for drafted nodes alone. Which tokens become nodes is decided level by level
(EAGLE-2, arXiv 2406.16858) where the logits are: what comes to the host is the whole draft, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import EagleConfig
from outpace.drafters.learned.eagle import Ask
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.drafters.learned.picks import RIVALS
from outpace.drafters.learned.torch_runtime import Shared, Slab, spans
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Draft, Drafts
from outpace.models.base import Model
from outpace.models.torch.choose import Asked, kept, likeliest, rough_gumbel
from outpace.models.torch.upload import uploaded


class TorchEagle:
    """See ``EagleRuntime``. ``limit``: hard bound in bytes on the KV. The checkpoint fits the target."""

    def __init__(self, target: Model, checkpoint: Checkpoint, *, limit: int | None = None) -> None:
        config = checkpoint.config
        assert isinstance(config, EagleConfig)
        self._shared = Shared(target, checkpoint)
        self._network = self._shared.filled(EagleNetwork(config), checkpoint)
        shape = config.decoder
        self.ids, self.max_length, self._device = self._shared.ids, shape.max_length, self._shared.device
        (self._ids,) = uploaded(self._device, self.ids)
        self._kv = Slab((2, shape.kv_heads, shape.head_dim), self._shared, limit)
        self._predicted: dict[int, Tensor] = {}  # features [h] that follow the last entries of rows that are extended

    def native_rows(self, *options: Any) -> None:
        """None: no native step drafts with it."""

    # -- drafting ----------------------------------------------------------------------------------------------------

    def feed(self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any]) -> None:
        with torch.no_grad():
            self._forget(rows)
            self._append(rows, tokens, [self._fused(states) for states in hidden_states])

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any]) -> F32:
        with torch.no_grad():
            features = []
            for row, states, entry in zip(rows, hidden_states, tokens, strict=True):
                if states is None and (row not in self._predicted or len(entry) != 1):
                    raise ValueError(f"row {row}: a predicted entry is one, and follows what was extended")
                features.append(self._predicted[row][None] if states is None else self._fused(states))
            before = [self.length(row) for row in rows]
            q, residual = self._append(rows, tokens, features)
            try:
                normed, predicted = self._last(rows, q, residual)
                logits: F32 = self._shared.logits(normed[:, 0]).float().cpu().numpy()
            except BaseException:
                self._cut(rows, before)
                raise
            self._predicted |= dict(zip(rows, predicted[:, 0], strict=True))
            return logits

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        with torch.no_grad():
            rows = [ask.row for ask in asks]
            self._forget(rows)
            before = [self.length(row) for row in rows]
            features = [self._fused(ask.hidden_states) for ask in asks]
            q, residual = self._append(rows, [ask.tokens for ask in asks], features)
            try:
                return self._grown(asks, rows, *self._last(rows, q, residual))
            except BaseException:
                self._cut(rows, before)
                raise

    def _fused(self, hidden_states: Any) -> Tensor:
        return self._network.fuse(self._shared.tensor(hidden_states))

    def _append(self, rows: Sequence[int], tokens: Sequence[I32], features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Write entries of rows; of each row's last one, the query [B, 1, heads, d] and the residual [B, 1, h].

        Raises MemoryLimitError, and then every row is as it was.
        """
        counts = [len(each) for each in tokens]
        starts = self._kv.lengthen(rows, counts)
        try:
            ids, position, slots, last = uploaded(
                self._device, np.concatenate(tokens), spans(starts, counts), np.repeat(self._kv.slots(rows), counts),
                np.cumsum(counts) - 1,
            )  # fmt: skip
            x, residual = self._network.enter(self._shared.embed(ids), torch.cat(features))
            cos, sin = self._network.rope(position)
            attention = self._network.layer.self_attn
            self._kv.write(slots, position, torch.stack(attention.keys_values(x, cos, sin), 1))
            return attention.queries(x[last], cos[last], sin[last])[:, None], residual[last][:, None]
        except BaseException:
            self._cut(rows, starts)
            raise

    def _read(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows' keys and values [B, s, 2, kv_heads, d], bool [B, s]: what each row has, and their lengths [B]."""
        lengths = [self.length(row) for row in rows]
        slots, ends = uploaded(self._device, self._kv.slots(rows), lengths)
        there = torch.arange(max(lengths), device=self._device)[None] < ends[:, None]
        return self._kv.read(slots, max(lengths)), there, ends

    def _last(self, rows: Sequence[int], q: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normed outputs and next features, both [B, 1, h], of rows' last entries."""
        values, there, _ = self._read(rows)
        return self._network.leave(residual, attend(q, values[:, :, 0], values[:, :, 1], there[:, None]))

    def _grown(self, asks: Sequence[Ask], rows: Sequence[int], normed: Tensor, features: Tensor) -> Drafts:
        """Drafts from what follows the rows' last entries [B, 1, h]: level by level, all rows together. Nothing comes
        to the host before all of it is drafted."""
        trees = Trees(asks, self._ids)
        values, there, lengths = self._read(rows)
        keys, values = [values[:, :, 0]], [values[:, :, 1]]  # the rows', then those of each level's nodes
        attention = self._network.layer.self_attn
        sees: Tensor | None = None  # bool [B, m, drafted nodes]
        for level in range(trees.levels):
            tokens, parent = trees.add(self._shared.logits(normed).float(), level)
            if level == trees.levels - 1:
                break
            m = tokens.shape[1]
            features = torch.gather(features, 1, parent[..., None].expand(-1, -1, features.shape[-1]))
            x, residual = self._network.enter(self._shared.embed(tokens), features)
            cos, sin = self._network.rope((lengths + level)[:, None].expand(-1, m))
            for list_, new in zip((keys, values), attention.keys_values(x, cos, sin), strict=True):
                list_.append(new)
            own = torch.eye(m, dtype=torch.bool, device=self._device).expand(len(asks), -1, -1)
            if sees is not None:
                own = torch.cat([torch.gather(sees, 1, parent[..., None].expand(-1, -1, sees.shape[-1])), own], -1)
            sees = own
            every = torch.cat([there[:, None].expand(-1, m, -1), sees], -1)
            mixed = attend(attention.queries(x, cos, sin), torch.cat(keys, 1), torch.cat(values, 1), every)
            normed, features = self._network.leave(residual, mixed)
        return trees.fetched()

    # -- rows --------------------------------------------------------------------------------------------------------

    def _forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._predicted.pop(row, None)

    def _cut(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, n in zip(rows, lengths, strict=True):
            self._kv.truncate(row, n)

    def length(self, row: int) -> int:
        return self._kv.length(row)

    def truncate(self, row: int, n: int) -> None:
        self._predicted.pop(row, None)
        self._kv.truncate(row, n)

    def fork(self, src: int, dst: int, n: int) -> None:
        self._kv.fork(src, dst, n)

    def release(self, row: int) -> None:
        self._predicted.pop(row, None)
        self._kv.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._kv.growth(row, min(positions, self.max_length))

    def exchange(self, other: TorchEagle) -> None:
        """See ``EagleRuntime.exchange``."""
        if self._network.config != other._network.config or not np.array_equal(self.ids, other.ids) or other._kv.rows:
            raise DrafterError("the drafter's weights cannot be exchanged: the two differ, or the other has rows")
        self._network, other._network = other._network, self._network
        self._shared, other._shared = other._shared, self._shared

    @property
    def bytes(self) -> int:
        return self._kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._predicted) <= set(self._kv.rows), "an output is kept of a row that is gone"
        self._kv.check(rows)

    def close(self) -> None:
        self._predicted.clear()
        self._kv.close()


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """[B, m, heads, d] of queries [B, m, heads, d], which see those of keys [B, s, kv_heads, d] that ``sees`` bool
    [B, m, s] says."""
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=sees[:, None], enable_gqa=True
    )
    return mixed.transpose(1, 2)


class Trees:
    """Trees (or chains) of a batch of ``asks``, grown where the logits are. ``ids`` int64 [D]: the target's ids of the
    draft vocabulary, ascending. What a row has no room for has a gain of -inf, and is expanded for nothing."""

    def __init__(self, asks: Sequence[Ask], ids: Tensor) -> None:
        self._asks, self._ids, self._branch = asks, ids, max(ask.branch for ask in asks)
        depths = [min(ask.levels, ask.nodes) for ask in asks]
        self.levels = max(depths)
        choosers = [(b, a.chooser) for b, a in enumerate(asks) if a.chooser is not None and not a.chooser.params.greedy]
        self._filtered = any(chooser.params.filtered for _, chooser in choosers)
        noisy = Asked.packed([chooser for _, chooser in choosers], np.zeros(len(choosers), np.int64))
        self._depths, self._noisy, asked = uploaded(ids.device, depths, [b for b, _ in choosers], noisy)
        self._asked = Asked.of(asked)
        self._frontier = ids.new_full((len(asks), 1), -1)  # indices among all nodes
        self._gains = torch.zeros((len(asks), 1), dtype=torch.float64, device=ids.device)  # logarithms, of its nodes
        self._finite = torch.ones((), dtype=torch.bool, device=ids.device)
        self._grown: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and gains [B, n] of each level

    def add(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Children of the frontier's nodes, of logits float32 [B, m, D]; then the likeliest of these are the frontier:
        their tokens [B, m'], and where in the frontier before each one's parent stands."""
        m = logits.shape[1]
        self._finite = self._finite & torch.isfinite(logits.amax())
        index = likeliest(logits, self._branch)
        gains = (logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)).double()
        if len(self._noisy):
            asked = Asked(*(each.repeat_interleave(m, 0) for each in self._asked))
            asked = asked._replace(index=asked.index + level)
            given = logits.index_select(0, self._noisy).flatten(0, 1)
            others, chances = noisy(given, asked, self._ids, self._branch, self._filtered)
            index = index.index_copy(0, self._noisy, others.view(-1, m, index.shape[-1]))
            gains = gains.index_copy(0, self._noisy, chances.view(-1, m, index.shape[-1]))
        gains = self._gains[..., None] + gains.clamp(max=0.0)
        gains = gains.masked_fill((level >= self._depths)[:, None, None], -torch.inf).flatten(1)
        tokens = self._ids[index].flatten(1)
        begin = sum(each.shape[1] for each, _, _ in self._grown)
        self._grown.append((tokens, self._frontier.repeat_interleave(index.shape[-1], 1), gains))
        best = gains.sort(dim=-1, descending=True, stable=True).indices[:, : self._branch]
        self._frontier, self._gains = begin + best, gains.gather(-1, best)
        return tokens.gather(-1, best), best // index.shape[-1]

    def fetched(self) -> Drafts:
        """The likeliest ``nodes`` of all of each row, parents before their children: one copy to the host. Raises
        NotFiniteError."""
        tokens, parents, gains = (torch.cat(each, 1) for each in zip(*self._grown, strict=True))
        order = gains.sort(dim=-1, descending=True, stable=True).indices[:, : max(ask.nodes for ask in self._asks)]
        place = torch.full_like(parents, -1).scatter(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        above = parents.gather(-1, order)
        above = torch.where(above < 0, above, place.gather(-1, above.clamp(min=0)))
        all_ = torch.stack([tokens.gather(-1, order).double(), above.double(), gains.gather(-1, order)])
        host = torch.cat([all_.flatten(), self._finite[None].double()]).cpu().numpy()
        if not host[-1]:
            raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
        found = []
        for ask, (token, parent, gain) in zip(self._asks, host[:-1].reshape(all_.shape).swapaxes(0, 1), strict=True):
            n = min(ask.nodes, int((gain > -np.inf).sum()))
            nodes = token[:n].astype(int).tolist(), parent[:n].astype(int).tolist(), np.exp(gain[:n]).tolist()
            found.append(Draft(*nodes, [0] * n))
        return Drafts.of(found, ())


def noisy(logits: Tensor, asked: Asked, ids: Tensor, k: int, filtered: bool) -> tuple[Tensor, Tensor]:
    """Indices int64 [n, k] of logits float32 [n, D] and their gains: see ``picks.chosen``."""
    index, scaled = kept(logits, asked, filtered)
    scores = scaled + rough_gumbel(ids[index], asked)
    best, at = scores.topk(min(max(k, RIVALS), scores.shape[-1]), -1)
    gains = best - best[:, :1]
    gains = gains - gains.logsumexp(-1, keepdim=True)
    return index.expand_as(scores).gather(-1, at[:, :k]), gains[:, :k]
