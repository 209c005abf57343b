"""DSpark's network beside a native target: products by its kernels, the rest in numpy; see ``parallel.Blocks``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint, Decoder, ParallelConfig
from outpace.drafters.learned.contexts import Contexts
from outpace.drafters.learned.parallel import Picker, Said
from outpace.drafters.learned.products import Product, Products
from outpace.drafters.learned.shared import draft_ids, rms_norm, silu
from outpace.models.native.model import NativeModel

_ALONE = 1 << 17  # multiplications that OpenBLAS leaves to one thread, with a margin of two


@dataclass(frozen=True, slots=True)
class _Layer:
    enters: F32  # norms' weights [h]
    after: F32
    q: Product
    k: Product
    v: Product
    o: Product
    gate: Product
    up: Product
    down: Product
    q_norm: F32 | None
    k_norm: F32 | None


class HostBlocks:
    """Row by row in numpy, whose sums may depend on what stands beside. The checkpoint fits the target."""

    def __init__(self, target: NativeModel, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        assert isinstance(config, ParallelConfig)
        tensors = dict(checkpoint.tensors)  # each is read once
        its, products = config.decoder, Products(target)

        def matrix(name: str) -> F32:
            values: F32 = np.ascontiguousarray(tensors[name], np.float32)
            return values

        def layer(at: str) -> _Layer:
            names = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
            enters, after = (matrix(f"{at}.{x}_layernorm.weight") for x in ("input", "post_attention"))
            norms = [matrix(f"{at}.self_attn.{x}_norm.weight") if its.qk_norm else None for x in "qk"]
            q, k, v, o, gate, up, down = (products.of(tensors[f"{at}.{x}.weight"]) for x in names)
            return _Layer(enters, after, q, k, v, o, gate, up, down, *norms)

        self._config, self._parts = config, target.parts
        self.ids: I32 = draft_ids(config.draft_vocab, tensors)
        self.slots = config.block - (not config.sample_from_anchor)
        self.max_length = its.max_length
        self._fc, self._head = products.of(tensors["fc.weight"]), products.head(tensors, self.ids)
        self._hidden_norm, self._norm = matrix("hidden_norm.weight"), matrix("norm.weight")
        self._layers = [layer(f"layers.{i}") for i in range(its.layers)]
        self._embedding = matrix("embed_tokens.weight") if "embed_tokens.weight" in tensors else None
        at = "markov_head.markov_{}.weight"
        self._markov = (matrix(at.format("w1")), products.of(tensors[at.format("w2")])) if config.markov_rank else None
        sure = [f"confidence_head.proj.{name}" for name in ("weight", "bias")]
        self._sure = [matrix(name) for name in sure] if config.confidence else None
        exponents = np.arange(0, its.head_dim, 2, dtype=np.float32) / np.float32(its.head_dim)
        self._frequencies: F32 = (1 / np.float32(its.rope_theta) ** exponents).astype(np.float32)

    def contexts(self) -> Contexts:
        its = self._config.decoder
        return Contexts(its.layers, its.kv_heads, its.head_dim, lambda shape: np.zeros(shape, np.float32), 4)

    def context(self, taps: Sequence[F32], positions: Sequence[I32]) -> list[F32]:
        return [self._context(its, at) for its, at in zip(taps, positions, strict=True)]

    def _context(self, taps: F32, position: I32) -> F32:
        fused = rms_norm(self._fc(taps.reshape(len(taps), -1)), self._hidden_norm, self._config.decoder.eps)
        turn = self._turn(position)
        return np.stack([np.stack(self._keys_values(layer, fused, turn)) for layer in self._layers])

    def draft(
        self, anchors: I32, positions: I32, contexts: Sequence[F32], pickers: Sequence[Picker | None], most: int
    ) -> Said:
        rows = zip(anchors.tolist(), positions.tolist(), contexts, strict=True)
        normed = np.stack([self._block(*row) for row in rows])
        logits = self._head(normed.reshape(-1, normed.shape[-1])).reshape(*normed.shape[:2], -1)
        said = [
            self._decide(int(anchor), states[:most], its[:most], pick)
            for anchor, states, its, pick in zip(anchors, normed, logits, pickers, strict=True)
        ]
        return Said(np.stack([index for index, _ in said]), np.stack([chance for _, chance in said]))

    def _block(self, anchor: int, position: int, context: F32) -> F32:
        """Normed states float32 [slots, h] of a row's block."""
        config = self._config
        its, size = config.decoder, config.block
        tokens = np.array([anchor, *[config.mask_token] * (size - 1)], np.int32)
        x: F32 = self._parts.embed(tokens) if self._embedding is None else self._embedding[tokens]
        turn = self._turn(np.arange(position, position + size, dtype=np.int32))
        for layer, (far_k, far_v) in zip(self._layers, context, strict=True):
            y = rms_norm(x, layer.enters, its.eps)
            k, v = self._keys_values(layer, y, turn)
            q = self._heads(layer.q, layer.q_norm, y)
            x += layer.o(_attend(_rotate(q, turn), k, v, far_k, far_v))
            y = rms_norm(x, layer.after, its.eps)
            x += layer.down(silu(layer.gate(y)) * layer.up(y))
        return rms_norm(x if config.sample_from_anchor else x[1:], self._norm, its.eps)

    def _decide(self, anchor: int, normed: F32, logits: F32, pick: Picker | None) -> tuple[I32, F32]:
        """Indices int32 [n] into the draft vocabulary and chances float32 [n], slot by slot: see ``Blocks.draft``."""
        token, index, chance = anchor, np.zeros(len(normed), np.int32), np.zeros(len(normed), np.float32)
        for slot, state in enumerate(normed):
            found, reads = logits[slot], state
            if self._markov is not None:
                before = self._markov[0][token]
                found = found + self._markov[1](before[None])[0]
                if self._config.confidence_markov:
                    reads = np.concatenate([state, before])
            index[slot] = found.argmax() if pick is None else pick(found)
            if self._sure is not None:
                weight, bias = self._sure
                chance[slot] = 1 / (1 + np.exp(-np.float64(weight[0] @ reads + bias[0])))
            else:
                chance[slot] = 1 / np.exp(found - found[index[slot]], dtype=np.float64).sum()
            token = int(self.ids[index[slot]])
        return index, chance

    def _turn(self, position: I32) -> tuple[F32, F32]:
        """Cosines and sines [n, 1, head_dim / 2]."""
        angles = position[:, None].astype(np.float32) * self._frequencies
        return np.cos(angles)[:, None], np.sin(angles)[:, None]

    def _heads(self, product: Product, norm: F32 | None, x: F32) -> F32:
        its: Decoder = self._config.decoder
        heads: F32 = product(x).reshape(len(x), -1, its.head_dim)
        return heads if norm is None else rms_norm(heads, norm, its.eps)

    def _keys_values(self, layer: _Layer, x: F32, turn: tuple[F32, F32]) -> tuple[F32, F32]:
        """Of states [n, h]: keys, rotated, and values, both [n, kv_heads, head_dim]."""
        return _rotate(self._heads(layer.k, layer.k_norm, x), turn), self._heads(layer.v, None, x)


def _rotate(x: F32, turn: tuple[F32, F32]) -> F32:
    """Heads [n, heads, d], halves of which turn."""
    cos, sin = turn
    left, right = np.split(x, 2, -1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def _attend(q: F32, k: F32, v: F32, far_k: F32, far_v: F32) -> F32:
    """[K, heads * d] of queries [K, heads, d], which see all of ``k``, ``v`` [K, kv_heads, d] and of the context
    [n, kv_heads, d]."""
    slots, heads, d = q.shape
    groups, n = k.shape[1], len(far_k)
    share = heads // groups
    q = (q * np.float32(d**-0.5)).reshape(slots, groups, share, d).transpose(1, 0, 2, 3).reshape(groups, -1, d)
    # Pieces so small that numpy starts no threads for their products, which the target's would starve.
    piece = max(1, _ALONE // (q.shape[1] * d))
    cuts = range(0, n, piece)
    scores = [q @ far_k[at : at + piece].transpose(1, 2, 0) for at in cuts]
    every = np.concatenate([*scores, q @ k.transpose(1, 2, 0)], -1)
    weights = np.exp(every - every.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: F32 = weights[..., n:] @ v.transpose(1, 0, 2)
    for at in cuts:
        values = far_v[at : at + piece]
        out += weights[..., at : at + len(values)] @ values.transpose(1, 0, 2)
    return out.reshape(groups, slots, share, d).transpose(1, 0, 2, 3).reshape(slots, -1)
