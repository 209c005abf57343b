"""EAGLE-3 in torch (arXiv 2503.01840; the norms of 3.1: arXiv 2605.09992): the reference, on the CPU and on cards.

One layer, so what stands behind an entry needs no more of it than its key and value: attention, feed-forward and head
are computed for a row's last entry and for drafted nodes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint, EagleConfig
from outpace.drafters.learned.choices import Growing, drafts_of
from outpace.drafters.learned.head import Ask
from outpace.drafters.learned.slab import Slab
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Drafts
from outpace.models.base import Model


class TorchHead:
    """See ``Head``. Weights take the type and device of what the target embeds; float32 beside a native target.

    ``limit``: hard bound in bytes on the KV. The checkpoint fits the target: ``eagle.check`` has seen to it.
    """

    def __init__(self, target: Model, checkpoint: Checkpoint, *, limit: int | None = None) -> None:
        config = checkpoint.config
        assert isinstance(config, EagleConfig)
        self._parts = target.parts
        sample = self._parts.embed(np.zeros(1, np.int32))
        self._in_torch = isinstance(sample, Tensor)
        device, dtype = (sample.device, sample.dtype) if self._in_torch else ("cpu", torch.float32)
        self._config, self._device, self._dtype = config, torch.device(device), dtype
        tensors = dict(checkpoint.tensors)  # each is read once
        self.ids: I32 = (np.arange(config.draft_vocab) + tensors.pop("d2t", 0)).astype(np.int32)
        rows, embedding = tensors.pop("lm_head.weight", None), tensors.pop("embed_tokens.weight", None)
        self._rows = None if rows is None else self._tensor(rows)  # None: the target's
        self._embedding = None if embedding is None else self._tensor(embedding)
        tensors.pop("t2d", None)
        self._w = {name: self._tensor(value) for name, value in tensors.items()}
        d = config.decoder
        self.max_length = d.max_length
        exponents = torch.arange(0, d.head_dim, 2, dtype=torch.float32, device=self._device) / d.head_dim
        self._frequencies = 1.0 / d.rope_theta**exponents
        self._kv = Slab(d.kv_heads, d.head_dim, self._device, self._dtype, limit)
        self._said: dict[int, Tensor] = {}  # outputs [H] after the last entries of rows that are extended

    # -- the network -------------------------------------------------------------------------------------------------

    def _tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(value)).to(self._device, self._dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name], self._config.decoder.eps)

    def _embed(self, tokens: I32) -> Tensor:
        """[n, H] of target ids int32 [n]."""
        if self._embedding is not None:
            return self._embedding[torch.from_numpy(tokens.astype(np.int64)).to(self._device)]
        return torch.as_tensor(self._parts.embed(tokens)).to(self._device, self._dtype)

    def _fused(self, taps: Any) -> Tensor:
        """g [n, H] of taps [n, T, H]."""
        states = torch.as_tensor(taps).to(self._device, self._dtype)
        if self._config.fc_norm:
            its = [self._norm(states[:, t], f"fc_norm.{t}.weight") for t in range(states.shape[1])]
            states = torch.stack(its, 1)
        flat = states.reshape(len(states), -1)
        if self._config.norm_before_fc:
            flat = self._norm(flat, "input_norm.weight")
        return F.linear(flat, self._w["fc.weight"])

    def _entered(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [.., 2 H], and the residual [.., H]."""
        normed = self._norm(g, "layers.0.hidden_norm.weight")
        x = torch.cat([self._norm(embedded, "layers.0.input_layernorm.weight"), normed], -1)
        return x, normed if self._config.norm_before_residual else g

    def _heads(self, x: Tensor, which: str, position: Tensor | None) -> Tensor:
        """[.., heads, head_dim] of what enters [.., 2 H], rotated to ``position`` [..]."""
        d = self._config.decoder
        heads = F.linear(x, self._w[f"layers.0.self_attn.{which}_proj.weight"]).unflatten(-1, (-1, d.head_dim))
        if position is None:
            return heads
        if d.qk_norm:
            heads = self._norm(heads, f"layers.0.self_attn.{which}_norm.weight")
        angles = (position[..., None].float() * self._frequencies)[..., None, :]
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        left, right = heads.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def _after(self, q: Tensor, residual: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        """Outputs [B, m, H] of queries [B, m, heads, d], which see those of keys [B, s, kv_heads, d] that ``sees``
        bool [B, m, s] says."""
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=sees[:, None], enable_gqa=True
        )
        out = F.linear(attended.transpose(1, 2).flatten(-2), self._w["layers.0.self_attn.o_proj.weight"])
        hidden = residual + out
        x = self._norm(hidden, "layers.0.post_attention_layernorm.weight")
        gate, up = (F.linear(x, self._w[f"layers.0.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return hidden + F.linear(F.silu(gate) * up, self._w["layers.0.mlp.down_proj.weight"])

    def _logits(self, outputs: Tensor) -> Tensor:
        """float32 [.., D] of outputs [.., H]."""
        normed = self._norm(outputs, "norm.weight")
        if self._rows is not None:
            return F.linear(normed, self._rows).float()
        flat = normed.reshape(-1, normed.shape[-1])
        found = torch.as_tensor(self._parts.logits(flat if self._in_torch else flat.numpy(), self.ids))
        return found.float().reshape(*normed.shape[:-1], -1)

    def _fed_back(self, outputs: Tensor) -> Tensor:
        """What a next entry has in place of fused taps."""
        return self._norm(outputs, "norm.weight") if self._config.norm_output else outputs

    # -- rows --------------------------------------------------------------------------------------------------------

    def _append(self, rows: Sequence[int], tokens: Sequence[I32], gs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Write entries of rows; of each row's last one, the query [B, 1, heads, d] and the residual [B, 1, H].

        Raises MemoryLimitError, and then every row is as it was.
        """
        counts = [len(its) for its in tokens]
        starts = self._kv.lengthen(rows, counts)
        try:
            x, residual = self._entered(self._embed(np.concatenate(tokens)), torch.cat(list(gs)))
            each = [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
            position = torch.from_numpy(np.concatenate(each)).to(self._device)
            k, v = self._heads(x, "k", position), self._heads(x, "v", None)
            self._kv.write(rows, starts, counts, k, v)
            last = torch.from_numpy(np.cumsum(counts) - 1).to(self._device)
            return self._heads(x[last], "q", position[last])[:, None], residual[last][:, None]
        except BaseException:
            for row, start in zip(rows, starts, strict=True):
                self._kv.truncate(row, start)
            raise

    def _last(self, rows: Sequence[int], q: Tensor, residual: Tensor) -> Tensor:
        """Outputs [B, H] of rows' last entries."""
        k, v, there = self._kv.read(rows)
        return self._after(q, residual, k, v, there[:, None])[:, 0]

    def feed(self, rows: Sequence[int], tokens: Sequence[I32], taps: Sequence[Any]) -> None:
        with torch.no_grad():
            self._forget(rows)
            self._append(rows, tokens, [self._fused(its) for its in taps])

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], taps: Sequence[Any]) -> F32:
        with torch.no_grad():
            gs = []
            for row, its, entry in zip(rows, taps, tokens, strict=True):
                if its is None and (row not in self._said or len(entry) != 1):
                    raise ValueError(f"row {row}: a predicted entry is one, and follows what was extended")
                gs.append(self._fed_back(self._said[row])[None] if its is None else self._fused(its))
            before = [self.length(row) for row in rows]
            q, residual = self._append(rows, tokens, gs)
            try:
                outputs = self._last(rows, q, residual)
                logits: F32 = self._logits(outputs).cpu().numpy()
            except BaseException:
                self._back(rows, before)
                raise
            self._said |= dict(zip(rows, outputs, strict=True))
            return logits

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        with torch.no_grad():
            rows = [ask.row for ask in asks]
            self._forget(rows)
            before = [self.length(row) for row in rows]
            q, residual = self._append(rows, [ask.tokens for ask in asks], [self._fused(ask.taps) for ask in asks])
            try:
                return self._grown(asks, rows, self._last(rows, q, residual)[:, None])
            except BaseException:
                self._back(rows, before)
                raise

    def _grown(self, asks: Sequence[Ask], rows: Sequence[int], outputs: Tensor) -> Drafts:
        """Drafts from outputs [B, 1, H] after the rows' last entries: level by level, all rows together."""
        trees = [Growing(ask, self.ids) for ask in asks]
        cached_k, cached_v, there = self._kv.read(rows)
        lengths = torch.tensor([self.length(row) for row in rows], device=self._device)
        drafted: list[tuple[Tensor, Tensor]] = []  # keys and values [B, m, kv_heads, d] of each level's nodes
        sees: Tensor | None = None  # bool [B, m, drafted nodes and their padding]
        for level in range(max(ask.levels for ask in asks)):
            logits = self._logits(outputs)
            if not bool(torch.isfinite(logits.amax())):
                raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
            for tree, its in zip(trees, logits, strict=True):
                tree.add(its)
            frontiers = [tree.expand() for tree in trees]
            m = max(len(frontier.parents) for frontier in frontiers)
            if not m:
                break
            # What a row lacks of m nodes is padding, which nobody sees.
            parent = torch.tensor([[*f.parents, *[0] * (m - len(f.parents))] for f in frontiers], device=self._device)
            tokens = np.array([[*f.tokens, *[0] * (m - len(f.tokens))] for f in frontiers], np.int32)
            outputs = torch.gather(outputs, 1, parent[..., None].expand(-1, -1, outputs.shape[-1]))
            x, residual = self._entered(
                self._embed(tokens.reshape(-1)).reshape(*tokens.shape, -1), self._fed_back(outputs)
            )
            position = (lengths + level)[:, None].expand(-1, m)
            drafted.append((self._heads(x, "k", position), self._heads(x, "v", None)))
            itself = torch.eye(m, dtype=torch.bool, device=self._device).expand(len(asks), -1, -1)
            above = sees if sees is None else torch.gather(sees, 1, parent[..., None].expand(-1, -1, sees.shape[-1]))
            sees = itself if above is None else torch.cat([above, itself], -1)
            outputs = self._after(
                self._heads(x, "q", position), residual,
                torch.cat([cached_k, *(k for k, _ in drafted)], 1), torch.cat([cached_v, *(v for _, v in drafted)], 1),
                torch.cat([there[:, None].expand(-1, m, -1), sees], -1),
            )  # fmt: skip
        return drafts_of(trees)

    def _forget(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._said.pop(row, None)

    def _back(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, n in zip(rows, lengths, strict=True):
            self._kv.truncate(row, n)

    def length(self, row: int) -> int:
        return self._kv.length(row)

    def truncate(self, row: int, n: int) -> None:
        self._said.pop(row, None)
        self._kv.truncate(row, n)

    def fork(self, src: int, dst: int, n: int) -> None:
        self._kv.fork(src, dst, n)

    def release(self, row: int) -> None:
        self._said.pop(row, None)
        self._kv.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._kv.growth(row, min(positions, self.max_length))

    def exchange(self, other: TorchHead) -> None:
        """See ``Head.exchange``."""
        if self._config != other._config or not np.array_equal(self.ids, other.ids) or other._kv.rows:
            raise DrafterError("the drafter's weights cannot be exchanged: the two differ, or the other has rows")
        self._w, other._w = other._w, self._w
        self._rows, other._rows = other._rows, self._rows
        self._embedding, other._embedding = other._embedding, self._embedding

    @property
    def bytes(self) -> int:
        return self._kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._said) <= set(self._kv.rows), "an output is kept of a row that is gone"
        self._kv.check(rows)

    def close(self) -> None:
        self._said.clear()
        self._kv.close()
