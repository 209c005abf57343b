"""Learned drafters for tests: tiny random ones, and their forward in numpy, as slow and plain as it can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.drafters.learned.configs import (
    Config,
    Decoder,
    EagleConfig,
    MedusaConfig,
    ParallelConfig,
    embedding_shape,
    head_shapes,
    tensor_shapes,
)

DECODER = Decoder(8, 1, 2, 1, 4, 16, 1e-5, 5000.0, 64)
VOCAB, DRAFT = 32, 12


def eagle(**changes: Any) -> EagleConfig:
    flags = {"norm_before_residual": False, "fc_norm": True, "norm_output": True, "norm_before_fc": False}
    return EagleConfig(
        **{"decoder": DECODER, "vocab": VOCAB, "draft_vocab": DRAFT, "taps": (1, 3, 4), **flags, **changes}
    )


def parallel(**changes: Any) -> ParallelConfig:
    decoder = Decoder(8, 2, 2, 1, 4, 16, 1e-5, 5000.0, 64, qk_norm=True)
    given = {"decoder": decoder, "vocab": VOCAB, "draft_vocab": DRAFT, "taps": (0, 2, 4), "block": 4, "mask_token": 3}
    return ParallelConfig(**{**given, "markov_rank": 4, "confidence": True, **changes})


def medusa(**changes: Any) -> MedusaConfig:
    given = {"hidden": 8, "vocab": VOCAB, "draft_vocab": DRAFT, "heads": 3, "layers": 1, "tree": ((0,), (1,), (0, 0))}
    return MedusaConfig(**{**given, **changes})


def random_tensors(config: Config, seed: int = 0, *, head: bool = False, embedding: bool = False) -> dict[str, Any]:
    """Canonical tensors, float32 that bfloat16 holds exactly; ``d2t`` and ``t2d`` of a random ascending choice."""
    rng = np.random.default_rng(seed)
    shapes = {**tensor_shapes(config), **(head_shapes(config) if head else {})}
    shapes |= embedding_shape(config) if embedding else {}
    tensors: dict[str, Any] = {name: exact(rng.normal(size=shape) * 0.5) for name, shape in sorted(shapes.items())}
    ids = np.sort(rng.permutation(config.vocab)[: config.draft_vocab])
    tensors["d2t"] = ids - np.arange(len(ids))
    tensors["t2d"] = np.isin(np.arange(config.vocab), ids)
    return tensors


def exact(values: Any) -> Any:
    """The nearest float32 below in size that bfloat16 holds."""
    return (np.asarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def rms(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def rotate(x: Any, positions: Any, theta: float) -> Any:
    """Rope of [n, heads, d], halves, at ``positions`` [n]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """[n, heads * d] from q [n, heads, d], k and v [m, kv, d], where ``seen`` bool [n, m]."""
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
    scores = np.where(seen, np.einsum("nhd,mhd->hnm", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights, v).reshape(len(q), -1)


class Eagle:
    """One row of an EAGLE-3 drafter: entries in, logits [D] of each and what it feeds back out."""

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Any]) -> None:
        self.config, self.w = config, {n: np.asarray(t, np.float64) for n, t in tensors.items()}
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def fused(self, taps: Any) -> Any:
        """g [h] of taps [3, h]."""
        w, eps, x = self.w, self.config.decoder.eps, taps
        if self.config.fc_norm:
            x = np.stack([rms(tap, w[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)])
        x = x.reshape(-1)
        return w["fc.weight"] @ (rms(x, w["input_norm.weight"], eps) if self.config.norm_before_fc else x)

    def entry(self, token: int, g: Any) -> tuple[Any, Any]:
        """The next entry, at the next position: its logits [D], and the g of a predicted entry after it."""
        c, d, w = self.config, self.config.decoder, self.w
        at = {name.removeprefix("layers.0."): t for name, t in w.items()}
        normed = rms(g, at["hidden_norm.weight"], d.eps)
        residual = normed if c.norm_before_residual else g
        x = np.concatenate([rms(w["embed_tokens.weight"][token], at["input_layernorm.weight"], d.eps), normed])
        q, k, v = ((at[f"self_attn.{n}_proj.weight"] @ x).reshape(1, -1, d.head_dim) for n in "qkv")
        if d.qk_norm:
            q, k = rms(q, at["self_attn.q_norm.weight"], d.eps), rms(k, at["self_attn.k_norm.weight"], d.eps)
        position = np.array([len(self.keys)])
        self.keys.append(rotate(k, position, d.rope_theta))
        self.values.append(v)
        keys, values = np.concatenate(self.keys), np.concatenate(self.values)
        mixed = attend(rotate(q, position, d.rope_theta), keys, values, np.ones((1, len(keys)), bool))[0]
        x = residual + at["self_attn.o_proj.weight"] @ mixed
        y = rms(x, at["post_attention_layernorm.weight"], d.eps)
        gated = silu(at["mlp.gate_proj.weight"] @ y) * (at["mlp.up_proj.weight"] @ y)
        x = x + at["mlp.down_proj.weight"] @ gated
        out = rms(x, w["norm.weight"], d.eps)
        return w["lm_head.weight"] @ out, out if c.norm_output else x

    def drop(self) -> None:
        """Forget the last entry."""
        del self.keys[-1], self.values[-1]


def eagle_steps(config: EagleConfig, tensors: Mapping[str, Any], taps: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits [n, D] of real entries (taps [n, 3, h], tokens [n]), and [n - 1, D] of a predicted one after each."""
    row = Eagle(config, tensors)
    first, second = [], []
    for i, (tap, token) in enumerate(zip(taps, tokens, strict=True)):
        logits, fed = row.entry(token, row.fused(tap))
        first.append(logits)
        if i + 1 < len(tokens):
            second.append(row.entry(tokens[i + 1], fed)[0])
            row.drop()
    return np.array(first), np.array(second)


def parallel_block(config: ParallelConfig, tensors: Mapping[str, Any], taps: Any, anchor: int) -> tuple[Any, Any]:
    """Normed hidden states [block, h] and logits [block, D], without the Markov bias, of the block that starts with the
    token ``anchor`` after positions of ``taps`` [n, T, h]."""
    d, w = config.decoder, {n: np.asarray(t, np.float64) for n, t in tensors.items()}
    n, block = len(taps), config.block
    context = rms(taps.reshape(n, w["fc.weight"].shape[1]) @ w["fc.weight"].T, w["hidden_norm.weight"], d.eps)
    x = w["embed_tokens.weight"][[anchor] + [config.mask_token] * (block - 1)]
    positions = np.arange(n + block)
    for i in range(d.layers):
        at = {name.removeprefix(f"layers.{i}."): t for name, t in w.items()}
        y = rms(x, at["input_layernorm.weight"], d.eps)
        q = (y @ at["self_attn.q_proj.weight"].T).reshape(block, -1, d.head_dim)
        both = np.concatenate([context, y])
        k = (both @ at["self_attn.k_proj.weight"].T).reshape(n + block, -1, d.head_dim)
        v = (both @ at["self_attn.v_proj.weight"].T).reshape(n + block, -1, d.head_dim)
        q = rotate(rms(q, at["self_attn.q_norm.weight"], d.eps), positions[n:], d.rope_theta)
        k = rotate(rms(k, at["self_attn.k_norm.weight"], d.eps), positions, d.rope_theta)
        x = x + attend(q, k, v, np.ones((block, n + block), bool)) @ at["self_attn.o_proj.weight"].T
        y = rms(x, at["post_attention_layernorm.weight"], d.eps)
        gated = silu(y @ at["mlp.gate_proj.weight"].T) * (y @ at["mlp.up_proj.weight"].T)
        x = x + gated @ at["mlp.down_proj.weight"].T
    hidden = rms(x, w["norm.weight"], d.eps)
    return hidden, hidden @ w["lm_head.weight"].T


def parallel_heads(config: ParallelConfig, tensors: Mapping[str, Any], hidden: Any, before: Any) -> tuple[Any, Any]:
    """The Markov bias [block, D] and the confidences' logits [block], for the tokens before each place [block]."""
    w = {n: np.asarray(t, np.float64) for n, t in tensors.items()}
    given = w["markov_head.markov_w1.weight"][before]
    read = np.concatenate([hidden, given], -1) if config.confidence_markov else hidden
    sure = read @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0]
    return given @ w["markov_head.markov_w2.weight"].T, sure
