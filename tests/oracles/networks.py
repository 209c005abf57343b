"""EAGLE-3 in numpy, as slow and plain as it can be told: nothing is kept between calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import EagleConfig
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser


def rms(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: Any, positions: Any, theta: float) -> Any:
    """Rope of [n, heads, d], halves, at ``positions`` [n]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None].astype(x.dtype), np.sin(angle)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def gelu(x: Any) -> Any:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Eagle:
    """``embedding`` [V, H], ``head`` [D, H]: the target's, where the checkpoint has none."""

    def __init__(self, checkpoint: Checkpoint, embedding: Any = None, head: Any = None) -> None:
        self.c, self.t = checkpoint.config, checkpoint.tensors
        self.embedding = self.t.get("embed_tokens.weight", embedding)
        self.head = self.t.get("lm_head.weight", head)
        self.ids = np.arange(self.c.draft_vocab) + self.t["d2t"]

    def norm(self, x: Any, name: str) -> Any:
        return rms(x, self.t[name], self.c.decoder.eps)

    def fused(self, hidden_states: Any) -> Any:
        """[n, T, H] -> g [n, H]."""
        if self.c.fc_norm:
            each = (self.norm(hidden_states[:, i], f"fc_norm.{i}.weight") for i in range(hidden_states.shape[1]))
            hidden_states = np.stack([*each], 1)
        flat = hidden_states.reshape(len(hidden_states), -1)
        if self.c.norm_before_fc:
            flat = self.norm(flat, "input_norm.weight")
        return flat @ self.t["fc.weight"].T

    def outputs(self, tokens: Any, g: Any) -> Any:
        """Of all entries [n, H], before the norm: tokens [n] and what stands beside them, g [n, H]."""
        d, n, t = self.c.decoder, len(tokens), {name.removeprefix("layers.0."): its for name, its in self.t.items()}
        normed, embedded = self.norm(g, "layers.0.hidden_norm.weight"), self.embedding[tokens]
        embedded = embedded * (d.embedding_scale or 1.0)
        entered = np.concatenate([rms(embedded, t["input_layernorm.weight"], d.eps), normed], 1)
        x = normed if self.c.norm_before_residual else g
        q, k, v = ((entered @ t[f"self_attn.{name}_proj.weight"].T).reshape(n, -1, d.head_dim) for name in "qkv")
        if d.qk_norm:
            q, k = (rms(its, t[f"self_attn.{name}_norm.weight"], d.eps) for name, its in (("q", q), ("k", k)))
        heads = q, k
        q, k = (rotate(its, np.arange(n), d.rope_theta) for its in heads)
        if d.gemma:  # the second half of the angles stands still
            q[..., 1::2], k[..., 1::2], v = heads[0][..., 1::2], heads[1][..., 1::2], rms(v, 1.0, d.eps)
        k, v = (np.repeat(its, d.heads // d.kv_heads, 1) for its in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / (1.0 if d.gemma else np.sqrt(x.dtype.type(d.head_dim)))
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)
        added = attended @ t["self_attn.o_proj.weight"].T
        x = x + (rms(added, t["post_attention_layernorm.weight"], d.eps) if d.gemma else added)
        inner = rms(x, t[f"{'pre_feedforward' if d.gemma else 'post_attention'}_layernorm.weight"], d.eps)
        gate, up = (inner @ t[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        added = ((gelu if d.gemma else silu)(gate) * up) @ t["mlp.down_proj.weight"].T
        if not d.gemma:
            return x + added
        return (x + rms(added, t["post_feedforward_layernorm.weight"], d.eps)) * t["layer_scalar"]

    def logits(self, tokens: Any, hidden_states: Any, path: list[int]) -> Any:
        """[D] after real entries tokens [n] with states [n, T, H] and predicted ones for the tokens of ``path``."""
        tokens, g = list(tokens), self.fused(hidden_states)
        outputs = self.outputs(tokens, g)
        for token in path:
            fed = self.norm(outputs[-1:], "norm.weight") if self.c.norm_output else outputs[-1:]
            tokens, g = [*tokens, token], np.concatenate([g, fed])
            outputs = self.outputs(tokens, g)
        found, cap = self.norm(outputs[-1], "norm.weight") @ self.head.T, self.c.decoder.logit_cap
        return cap * np.tanh(found / cap) if cap else found


def eagle_steps(config: EagleConfig, tensors: Mapping[str, Any], hidden_states: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits [n, D] of real entries (states [n, 3, h], tokens [n]), and [n - 1, D] of a predicted one after each."""
    wide = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
    row, n = Eagle(Checkpoint("eagle", config, wide)), len(tokens)
    first = [row.logits(tokens[: i + 1], hidden_states[: i + 1], []) for i in range(n)]
    return np.array(first), np.array([row.logits(tokens[:i], hidden_states[:i], [tokens[i]]) for i in range(1, n)])


def grown(
    logits_after: Any, ids: Any, nodes: int, levels: int, branch: int, chooser: Chooser | None
) -> dict[Any, float]:
    """Path (tuple of token ids) -> probability of the tree's nodes; ``logits_after(path)`` [D]. All levels in full."""
    sampled = chooser is not None and not chooser.params.greedy
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for depth in range(levels):
        new: list[tuple[int, ...]] = []
        for path in frontier:
            raw = np.asarray(logits_after(path), np.float64)
            scaled = raw / chooser.params.temperature if sampled and chooser else raw
            q = np.exp(scaled - scaled.max())
            q /= q.sum()
            score = scaled
            if sampled and chooser:
                score = scaled + chooser.noise.gumbel(chooser.index + depth, ids.astype(np.int32), Stream.CHOICE)
            best = np.lexsort((ids, -score))
            if sampled:
                listed = best[: max(16, branch)]
                q = np.exp(score - score[best[0]]) / np.exp(score[listed] - score[best[0]]).sum()
            for i in best[:branch]:
                its = (*path, int(ids[i]))
                found[its] = found.get(path, 1.0) * q[i]
                new.append(its)
        frontier = sorted(new, key=lambda path: -found[path])[:branch]
    return dict(sorted(found.items(), key=lambda item: -item[1])[:nodes])
