"""EAGLE-3's network with the norms of 3.1 (arXiv 2503.01840, 2605.09992): one decoder layer over token and features.

Training unrolls it (training/objectives/eagle.py). Its parameters have the names of speculators 0.9, so that
``state_dict()`` is what a checkpoint holds, less the head.

Drafting, on the CPU and on cards: one layer, so what stands behind an entry needs no more of it than its key and value;
attention, feed-forward and head are computed for a row's last entry and for drafted nodes alone. Which tokens become
nodes is decided level by level (EAGLE-2, arXiv 2406.16858) where the logits are: what comes to the host is the whole
draft, once. On a card all of it, from new entries to the ranking of nodes, is one CUDA graph.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import Decoder, EagleConfig
from outpace.drafters.learned.drafter import Ask, Network, Predicted
from outpace.drafters.learned.networks.beside import Shared, Slab, spans
from outpace.drafters.learned.networks.layers import Layer, Norm, Rope
from outpace.drafters.learned.networks.trees import SAMPLES, Bucket, Trees, choices, drafts_of, noise_of
from outpace.errors import DrafterError, OutpaceError, ParameterError
from outpace.exact.drafts import Drafts
from outpace.models.base import Model
from outpace.models.torch.choose import Asked
from outpace.models.torch.graphs import TOKENS, Captures, padded
from outpace.models.torch.upload import Upload, uploaded

log = logging.getLogger(__name__)
CLOSE = 0.05  # chances of nodes, as a graph has them and as they are


class EagleLayer(Layer):
    """Attention reads 2 h numbers: the token's, then the features'."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.hidden_norm = Norm(shape.hidden, shape.eps)


class EagleNetwork(nn.Module):
    """The parts of an entry's forward; who calls them decides what the entry attends to.

    An entry reads features g [..., h] and the embedding [..., h] of the token after it. Raises ParameterError for a
    shape that EAGLE-3 does not have.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        shape = config.decoder
        if shape.layers != 1:
            raise ParameterError(f"EAGLE-3 has one layer, not {shape.layers}: use another method")
        if config.norm_before_fc and config.fc_norm:
            raise ParameterError("norm_before_fc and fc_norm exclude one another: give one of them")
        self.config = config
        width = len(config.hidden_layers) * shape.hidden
        self.fc = nn.Linear(width, shape.hidden, bias=False)
        norms = (Norm(shape.hidden, shape.eps) for _ in config.hidden_layers)
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.input_norm = Norm(width, shape.eps) if config.norm_before_fc else None
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.rope = Rope(shape)

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def fused_input(self, hidden_states: Tensor) -> Tensor:
        """What ``fc`` reads [n, T h] of the target's hidden states [n, T, h]."""
        if self.fc_norm is not None:
            hidden_states = torch.stack([norm(hidden_states[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        flat = hidden_states.flatten(1)
        return flat if self.input_norm is None else self.input_norm(flat)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Features g [n, h] of the target's hidden states [n, T, h]."""
        g: Tensor = self.fc(self.fused_input(hidden_states))
        return g

    def enter(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2 h], and the residual [..., h]."""
        normed = self.layer.hidden_norm(g)
        return torch.cat([self.layer.input_layernorm(embedded), normed], -1), self.residual(g, normed)

    def residual(self, g: Tensor, normed: Tensor) -> Tensor:
        """What the layer adds to: g, or g after ``hidden_norm``."""
        return normed if self.config.norm_before_residual else g

    def leave(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """From the residual [..., h] and attention's [..., heads, head_dim]: the output [..., h] after ``norm``, which
        the head reads, and the features [..., h] of the next entry, which the network itself predicts."""
        hidden = self.layer.leave(residual, mixed.flatten(-2))
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


# -- drafting ----------------------------------------------------------------------------------------------------------


class TorchEagle(Network):
    """EAGLE-3. ``limit``: hard bound in bytes on the KV. ``graphs``: draft in fixed shapes, which a card
    replays as CUDA graphs (None: on a card). The checkpoint fits the target."""

    kv: Slab

    def __init__(
        self, target: Model, checkpoint: Checkpoint, *, limit: int | None = None, graphs: bool | None = None
    ) -> None:
        config = checkpoint.config
        assert isinstance(config, EagleConfig)
        self._shared = Shared(target, checkpoint)
        self._network = self._shared.filled(EagleNetwork(config), checkpoint)
        shape = config.decoder
        self.ids, self.max_length, self._device = self._shared.ids, shape.max_length, self._shared.device
        self._window = shape.window(0)
        (self._ids,) = uploaded(self._device, self.ids)
        self.kv = Slab((2, shape.kv_heads, shape.head_dim), self._shared, limit)
        self.captures: Captures | None = None
        if self._device.type == "cuda" if graphs is None else graphs:
            try:
                self._prove(config)
                self.captures = Captures(self._device, _warned)
            except (OutpaceError, RuntimeError) as error:
                _warned(f"CUDA graphs are off, which costs speed: {error}")

    def _prove(self, config: EagleConfig) -> None:
        """Draft as a graph and without one. Raises DrafterError where the two differ."""
        size = (3, len(config.hidden_layers), config.decoder.hidden)
        states = torch.linspace(-1, 1, int(np.prod(size)), device=self._device).view(size)
        ask = Ask(-1, self.ids[np.arange(3) % len(self.ids)], states, 8, 3, 2, SAMPLES)
        trial, chances = Captures(self._device), list[Any]()
        try:
            for self.captures in (trial, trial, None):
                chances.append(self.draft([ask]).confidence)
                self.kv.release(-1)
        finally:
            self.captures = None
        if not all(np.allclose(chances[2], each, atol=CLOSE) for each in chances[:2]):
            raise DrafterError("a graph's draft is another")

    # -- drafting ----------------------------------------------------------------------------------------------------

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        with torch.no_grad():
            self._append(rows, tokens, [self._fused(states) for states in hidden_states])

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        with torch.no_grad():
            before = [self.kv.length(row) for row in rows]
            features = [each.features[None] if isinstance(each, Predicted) else self._fused(each) for each in given]
            q, residual = self._append(rows, tokens, features)
            try:
                normed, predicted = self._last(rows, q, residual)
                logits: F32 = self._shared.logits(normed[:, 0]).float().cpu().numpy()
            except BaseException:
                self._cut(rows, before)
                raise
            return logits, [Predicted(each) for each in predicted[:, 0]]

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        rows, counts = [ask.row for ask in asks], [len(ask.tokens) for ask in asks]
        with torch.no_grad():
            starts = self.kv.lengthen(rows, counts)
            try:
                states = torch.cat([self._shared.tensor(ask.hidden_states) for ask in asks])
                fits = self.captures is not None and len(states) <= TOKENS
                bucket = self._bucket(asks, counts, fits)
                upload = Upload()
                upload.add(self._entries(asks, starts, counts, bucket.entries))
                upload.add(self._asked(asks, counts, bucket.rows))
                more = states[:1].expand(bucket.entries - len(states), -1, -1)
                inputs = upload.send(self._device), torch.cat([states, more]) if len(more) else states
                found = None
                if fits and self.captures is not None and self.captures.wants(bucket, self.kv.place):
                    found = self.captures(bucket, inputs, partial(self._drawn, bucket))
                found = self._drawn(bucket, *inputs) if found is None else found
                return drafts_of(asks, found.cpu().numpy(), bucket.rows)
            except BaseException:
                self._cut(rows, starts)
                raise

    def _bucket(self, asks: Sequence[Ask], counts: Sequence[int], fixed: bool) -> Bucket:
        """The shape of the asks' draft; ``fixed``: one of few."""
        rows, entries, nodes = len(asks), sum(counts), max(ask.nodes for ask in asks)
        slots = max(self.kv.length(ask.row) for ask in asks)
        if fixed:
            rows, entries, nodes = (1 << (n - 1).bit_length() for n in (rows, entries, nodes))
            slots = min(padded(slots, rows), self.kv.longest)
        levels = max(min(ask.levels, ask.nodes) for ask in asks)
        return Bucket(rows, entries, slots, levels, max(ask.branch for ask in asks), nodes, noise_of(asks))

    def _entries(
        self, asks: Sequence[Ask], starts: Sequence[int], counts: Sequence[int], n: int
    ) -> npt.NDArray[np.int64]:
        """int64 [3, n]: new entries' tokens, positions and slots."""
        slots = np.repeat(self.kv.slots([ask.row for ask in asks]), counts)
        return _filled(np.stack([np.concatenate([ask.tokens for ask in asks]), spans(starts, counts), slots]), n)

    def _asked(self, asks: Sequence[Ask], counts: Sequence[int], n: int) -> npt.NDArray[np.int64]:
        """int64 [5 + fields, n]: where each row's last new entry stands, the row's slot, length and levels, whether it
        samples, and by which noise (``Asked``)."""
        rows = [ask.row for ask in asks]
        own = [
            np.cumsum(counts) - 1, self.kv.slots(rows), [self.kv.length(row) for row in rows],
            [min(ask.levels, ask.nodes) for ask in asks],
        ]  # fmt: skip
        return _filled(np.concatenate([np.array(own, np.int64), choices(asks)]), n)

    def _fused(self, hidden_states: Any) -> Tensor:
        return self._network.fuse(self._shared.tensor(hidden_states))

    def _append(self, rows: Sequence[int], tokens: Sequence[I32], features: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Write entries of rows; of each row's last one, the query [B, 1, heads, d] and the residual [B, 1, h].

        Raises MemoryLimitError, and then every row is as it was.
        """
        counts = [len(each) for each in tokens]
        starts = self.kv.lengthen(rows, counts)
        try:
            ids, position, slots, last = uploaded(
                self._device, np.concatenate(tokens), spans(starts, counts), np.repeat(self.kv.slots(rows), counts),
                np.cumsum(counts) - 1,
            )  # fmt: skip
            return self._entered(ids, position, slots, last, torch.cat(features))
        except BaseException:
            self._cut(rows, starts)
            raise

    def _entered(
        self, ids: Tensor, position: Tensor, slots: Tensor, last: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``_append``, where there is room: entries [N], of which those at ``last`` [B] are the rows' last ones."""
        x, residual = self._network.enter(self._shared.embed(ids), features)
        cos, sin = self._network.rope(position)
        attention = self._network.layer.self_attn
        self.kv.write(slots, position, torch.stack(attention.keys_values(x, cos, sin), 1))
        return attention.queries(x[last], cos[last], sin[last])[:, None], residual[last][:, None]

    def _read(self, slots: Tensor, ends: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, s, 2, kv_heads, d] of rows at ``slots`` [B], bool [B, s]: what each has of lengths
        ``ends`` [B]."""
        there = torch.arange(longest, device=self._device)[None] < ends[:, None]
        return self.kv.read(slots, longest), self._near(there, ends)

    def _near(self, there: Tensor, ends: Tensor) -> Tensor:
        """Of what is ``there`` [B, s], what a query sees that is the last of ``ends`` [B] entries."""
        if not self._window:
            return there
        at = torch.arange(there.shape[1], device=self._device)
        return there & (at[None] >= ends[:, None] - self._window)

    def _last(self, rows: Sequence[int], q: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normed outputs and next features, both [B, 1, h], of rows' last entries."""
        lengths = [self.kv.length(row) for row in rows]
        slots, ends = uploaded(self._device, self.kv.slots(rows), lengths)
        values, there = self._read(slots, ends, max(lengths))
        return self._network.leave(residual, attend(q, values[:, :, 0], values[:, :, 1], there[:, None]))

    def _drawn(self, bucket: Bucket, indices: Tensor, states: Tensor) -> Tensor:
        """``Trees.ranked`` of ``_entries`` and ``_asked``, with the entries' hidden states [N, T, h]: level by level,
        all rows together. No value comes to the host, no shape depends on one."""
        ids, position, at = indices[: 3 * bucket.entries].view(3, -1).unbind()
        asked = indices[3 * bucket.entries :].view(-1, bucket.rows)
        last, slots, lengths, depths, samples = asked[:5].unbind()
        q, residual = self._entered(ids, position, at, last, self._network.fuse(states))
        read, there = self._read(slots, lengths, bucket.slots)
        keys, values = [read[:, :, 0]], [read[:, :, 1]]  # the rows', then those of each level's nodes
        normed, features = self._network.leave(residual, attend(q, keys[0], values[0], there[:, None]))
        trees = Trees(bucket, self._ids, depths, samples.bool(), Asked.of(asked[5:]))
        attention = self._network.layer.self_attn
        sees: Tensor | None = None  # bool [B, m, drafted nodes]
        for level in range(bucket.levels):
            tokens, parent = trees.add(self._shared.logits(normed).float(), level)
            if level == bucket.levels - 1:
                break
            m = tokens.shape[1]
            features = torch.gather(features, 1, parent[..., None].expand(-1, -1, features.shape[-1]))
            x, residual = self._network.enter(self._shared.embed(tokens), features)
            cos, sin = self._network.rope((lengths + level)[:, None].expand(-1, m))
            for list_, new in zip((keys, values), attention.keys_values(x, cos, sin), strict=True):
                list_.append(new)
            own = torch.eye(m, dtype=torch.bool, device=self._device).expand(bucket.rows, -1, -1)
            if sees is not None:
                own = torch.cat([torch.gather(sees, 1, parent[..., None].expand(-1, -1, sees.shape[-1])), own], -1)
            sees = own
            far = self._near(there, lengths + level + 1)
            every = torch.cat([far[:, None].expand(-1, m, -1), sees], -1)
            mixed = attend(attention.queries(x, cos, sin), torch.cat(keys, 1), torch.cat(values, 1), every)
            normed, features = self._network.leave(residual, mixed)
        return trees.ranked()

    def _cut(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, n in zip(rows, lengths, strict=True):
            self.kv.truncate(row, n)

    def close(self) -> None:
        super().close()
        if self.captures is not None:
            self.captures.close()


def _warned(why: str) -> None:
    log.warning("the drafter's %s", why)


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """[B, m, heads, d] of queries [B, m, heads, d], which see those of keys [B, s, kv_heads, d] that ``sees`` bool
    [B, m, s] says."""
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=sees[:, None], enable_gqa=True
    )
    return mixed.transpose(1, 2)


def _filled(values: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """[k, n] of values [k, m], the first of which fills up the rest."""
    return np.concatenate([values, np.repeat(values[:, :1], n - values.shape[1], 1)], 1)
