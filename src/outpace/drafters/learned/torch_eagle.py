"""EAGLE-3 in torch (arXiv 2503.01840), on the module that is trained; on the CPU and on cards.

One layer, so what stands behind an entry needs no more of it than its key and value: attention, feed-forward and head
are computed for a row's last entry and for drafted nodes alone. Which tokens become nodes is decided level by level
(EAGLE-2, arXiv 2406.16858): the chosen come to the host, logits only where the request's noise decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import EagleConfig
from outpace.drafters.learned.eagle import Ask
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.drafters.learned.picks import chosen
from outpace.drafters.learned.torch_runtime import Shared, Slab
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Draft, Drafts
from outpace.models.base import Model


class TorchEagle:
    """See ``EagleRuntime``. ``limit``: hard bound in bytes on the KV. The checkpoint fits the target."""

    def __init__(self, target: Model, checkpoint: Checkpoint, *, limit: int | None = None) -> None:
        config = checkpoint.config
        assert isinstance(config, EagleConfig)
        self._shared = Shared(target, checkpoint)
        self._network = self._shared.filled(EagleNetwork(config), checkpoint)
        shape = config.decoder
        self.ids, self.max_length, self._device = self._shared.ids, shape.max_length, self._shared.device
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
            x, residual = self._network.enter(self._shared.embed(np.concatenate(tokens)), torch.cat(features))
            each = [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
            cos, sin = self._network.rope(torch.from_numpy(np.concatenate(each)).to(self._device))
            attention = self._network.layer.self_attn
            self._kv.write(rows, starts, counts, torch.stack(attention.keys_values(x, cos, sin), 1))
            last = torch.from_numpy(np.cumsum(counts) - 1).to(self._device)
            return attention.queries(x[last], cos[last], sin[last])[:, None], residual[last][:, None]
        except BaseException:
            self._cut(rows, starts)
            raise

    def _last(self, rows: Sequence[int], q: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normed outputs and next features, both [B, 1, h], of rows' last entries."""
        values, there = self._kv.read(rows)
        return self._network.leave(residual, attend(q, values[:, :, 0], values[:, :, 1], there[:, None]))

    def _grown(self, asks: Sequence[Ask], rows: Sequence[int], normed: Tensor, features: Tensor) -> Drafts:
        """Drafts from what follows the rows' last entries [B, 1, h]: level by level, all rows together."""
        trees = [Growing(ask, self.ids) for ask in asks]
        values, there = self._kv.read(rows)
        keys, values = [values[:, :, 0]], [values[:, :, 1]]  # the rows', then those of each level's nodes
        lengths = torch.tensor([self.length(row) for row in rows], device=self._device)
        attention = self._network.layer.self_attn
        sees: Tensor | None = None  # bool [B, m, drafted nodes and their padding]
        for level in range(max(ask.levels for ask in asks)):
            logits = self._shared.logits(normed).float()
            if not bool(torch.isfinite(logits.amax())):
                raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
            for tree, own in zip(trees, logits, strict=True):
                tree.add(own)
            frontiers = [tree.expand() for tree in trees]
            m = max(len(frontier.parents) for frontier in frontiers)
            if not m:
                break
            # What a row lacks of m nodes is padding, which nobody sees.
            parent = torch.tensor([[*f.parents, *[0] * (m - len(f.parents))] for f in frontiers], device=self._device)
            tokens = np.array([[*f.tokens, *[0] * (m - len(f.tokens))] for f in frontiers], np.int32)
            embedded = self._shared.embed(tokens.reshape(-1)).unflatten(0, tokens.shape)
            features = torch.gather(features, 1, parent[..., None].expand(-1, -1, features.shape[-1]))
            x, residual = self._network.enter(embedded, features)
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
        return drafts_of(trees)

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


class Frontier(NamedTuple):
    """Nodes to expand: their tokens, and where in the frontier before each one's parent stands."""

    tokens: list[int]
    parents: list[int]


class Growing:
    """The tree (or chain) of one ``ask``. ``ids`` int32 [D]: the target's ids of the draft vocabulary, ascending."""

    def __init__(self, ask: Ask, ids: I32) -> None:
        self._ask, self._ids = ask, ids
        self._levels = min(ask.levels, ask.nodes)
        self._chooser = None if ask.chooser is None or ask.chooser.params.greedy else ask.chooser
        self._tree = Draft()  # of all candidates; gains are logarithms
        self._frontier: list[int] = [-1]
        self._columns: list[int] = [-1]  # nodes whose forward came last
        self._level = 0

    def add(self, logits: Tensor) -> None:
        """Children of the frontier's nodes, of logits float32 [m, D] (those beyond the frontier are padding)."""
        if self._level >= self._levels:
            self._frontier = []
            return
        own = logits[: len(self._frontier)]
        if self._chooser is None:
            tokens, gains = likeliest(own, self._ask.branch)
        else:
            found = [chosen(row, self._ids, self._chooser, self._level, self._ask.branch) for row in own.cpu().numpy()]
            tokens, gains = [t for t, _ in found], [g for _, g in found]
        begin = len(self._tree)
        for node, children, logarithms in zip(self._frontier, tokens, gains, strict=True):
            above = self._tree.gains[node] if node >= 0 else 0.0
            for token, gain in zip(children, logarithms, strict=True):
                self._tree.add(int(self._ids[token]), node, above + min(gain, 0.0))
        self._level += 1
        self._frontier = list(range(begin, len(self._tree)))

    def expand(self) -> Frontier:
        """What the next level's forward is of: the likeliest of the last level's nodes; none where it was the last."""
        before = self._tree.parents
        if self._level >= self._levels:
            self._frontier = []
        ranked = sorted(self._frontier, key=lambda n: -self._tree.gains[n])[: self._ask.branch]
        columns = {node: j for j, node in enumerate(self._columns)}
        self._columns = self._frontier = ranked
        return Frontier([self._tree.tokens[n] for n in ranked], [columns[before[n]] for n in ranked])

    def tree(self) -> Draft:
        """The ``nodes`` likeliest of all, parents before their children; gains are path probabilities."""
        grown = self._tree
        best = sorted(range(len(grown)), key=lambda n: -grown.gains[n])[: self._ask.nodes]
        kept, place = Draft(), {-1: -1}
        for node in best:
            place[node] = kept.add(grown.tokens[node], place[grown.parents[node]], float(np.exp(grown.gains[node])))
        return kept


def drafts_of(trees: Sequence[Growing]) -> Drafts:
    """What was drafted for a batch."""
    return Drafts.of([tree.tree() for tree in trees], ())


def likeliest(logits: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The ``k`` tokens of the largest logits of each row of float32 [m, D] (the lower on ties), best first, and the
    logarithms of their probabilities."""
    d = logits.shape[-1]
    bits = (logits + 0.0).contiguous().view(torch.int32)  # in the order of whole numbers, but for negative ones
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = ordered * (1 << 24) + torch.arange(d - 1, -1, -1, device=logits.device)
    best = keys.topk(min(k, d), -1).indices
    gains = logits.gather(-1, best) - logits.logsumexp(-1, keepdim=True)
    both = torch.stack([best.to(torch.float64), gains.to(torch.float64)]).cpu().numpy()
    tokens: list[list[int]] = both[0].astype(np.int64).tolist()
    return tokens, both[1].tolist()
