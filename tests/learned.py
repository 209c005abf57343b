"""Learned drafters for tests: tiny random ones, and their forward in numpy, as slow and plain as it can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.drafters.learned.checkpoint import Checkpoint
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
from tests.native.eagle_reference import Reference

DECODER = Decoder(8, 1, 2, 1, 4, 16, 1e-5, 5000.0, 64)
VOCAB, DRAFT = 32, 12


def eagle(**changes: Any) -> EagleConfig:
    flags = {"norm_before_residual": False, "fc_norm": True, "norm_output": True, "norm_before_fc": False}
    return EagleConfig(
        **{"decoder": DECODER, "vocab": VOCAB, "draft_vocab": DRAFT, "hidden_layers": (1, 3, 4), **flags, **changes}
    )


def parallel(**changes: Any) -> ParallelConfig:
    decoder = Decoder(8, 2, 2, 1, 4, 16, 1e-5, 5000.0, 64, qk_norm=True)
    given = {
        "decoder": decoder,
        "vocab": VOCAB,
        "draft_vocab": DRAFT,
        "hidden_layers": (0, 2, 4),
        "block": 4,
        "mask_token": 3,
    }
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


def eagle_steps(config: EagleConfig, tensors: Mapping[str, Any], hidden_states: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits [n, D] of real entries (states [n, 3, h], tokens [n]), and [n - 1, D] of a predicted one after each."""
    wide = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
    row, n = Reference(Checkpoint("eagle", config, wide), None, None), len(tokens)
    first = [row.logits(tokens[: i + 1], hidden_states[: i + 1], []) for i in range(n)]
    return np.array(first), np.array([row.logits(tokens[:i], hidden_states[:i], [tokens[i]]) for i in range(1, n)])


def parallel_block(
    config: ParallelConfig, tensors: Mapping[str, Any], hidden_states: Any, anchor: int
) -> tuple[Any, Any]:
    """Normed hidden states [block, h] and logits [block, D], without the Markov bias, of the block that starts with the
    token ``anchor`` after positions of ``hidden_states`` [n, T, h]."""
    d, w = config.decoder, {n: np.asarray(t, np.float64) for n, t in tensors.items()}
    n, block = len(hidden_states), config.block
    context = rms(hidden_states.reshape(n, w["fc.weight"].shape[1]) @ w["fc.weight"].T, w["hidden_norm.weight"], d.eps)
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
