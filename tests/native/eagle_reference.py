"""EAGLE-3 in numpy, float32, as it is written in the papers: nothing is kept between calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.configs import EagleConfig
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser


def random_checkpoint(
    rng: np.random.Generator, config: EagleConfig, head: bool = False, embedding: bool = False, sharp: float = 1.0
) -> Checkpoint:
    """``sharp``: what the layer's and the head's outputs are multiplied by, so that drafts are not all alike."""
    d = config.decoder
    layers = len(config.hidden_layers)

    def matrix(rows: int, cols: int) -> Any:
        return rng.normal(0, sharp / np.sqrt(cols), (rows, cols)).astype(np.float32)

    def norm(n: int = d.hidden) -> Any:
        return rng.normal(1, 0.2, n).astype(np.float32)

    ids = np.sort(rng.choice(config.vocab, config.draft_vocab, replace=False))
    t: dict[str, Any] = {"d2t": ids - np.arange(config.draft_vocab), "t2d": np.isin(np.arange(config.vocab), ids)}
    t |= {"fc.weight": matrix(d.hidden, layers * d.hidden), "norm.weight": norm()}
    for i in range(d.layers):
        at, enters = f"layers.{i}.", d.hidden * (2 if i == 0 else 1)
        t |= {at + "input_layernorm.weight": norm(), at + "post_attention_layernorm.weight": norm()}
        if i == 0:
            t[at + "hidden_norm.weight"] = norm()
        q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
        t |= {at + "self_attn.q_proj.weight": matrix(q, enters), at + "self_attn.k_proj.weight": matrix(kv, enters)}
        t |= {at + "self_attn.v_proj.weight": matrix(kv, enters), at + "self_attn.o_proj.weight": matrix(d.hidden, q)}
        t |= {at + "mlp.gate_proj.weight": matrix(d.ffn, d.hidden), at + "mlp.up_proj.weight": matrix(d.ffn, d.hidden)}
        t[at + "mlp.down_proj.weight"] = matrix(d.hidden, d.ffn)
        if d.qk_norm:
            t |= {f"{at}self_attn.{name}_norm.weight": norm(d.head_dim) for name in "qk"}
    if config.fc_norm:
        t |= {f"fc_norm.{i}.weight": norm() for i in range(layers)}
    if config.norm_before_fc:
        t["input_norm.weight"] = norm(layers * d.hidden)
    if head:
        t["lm_head.weight"] = matrix(config.draft_vocab, d.hidden)
    if embedding:
        t["embed_tokens.weight"] = matrix(config.vocab, d.hidden)
    return Checkpoint("eagle", config, t)


class Reference:
    """``embedding`` [V, H], ``head`` [D, H]: the target's, where the checkpoint has none."""

    def __init__(self, checkpoint: Checkpoint, embedding: Any, head: Any) -> None:
        self.c, self.t = checkpoint.config, checkpoint.tensors
        self.embedding = self.t.get("embed_tokens.weight", embedding)
        self.head = self.t.get("lm_head.weight", head)
        self.ids = np.arange(self.c.draft_vocab) + self.t["d2t"]

    def norm(self, x: Any, name: str) -> Any:
        w = self.t[name]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.decoder.eps) * w

    def fused(self, hidden_states: Any) -> Any:
        """[n, T, H] -> g [n, H]."""
        if self.c.fc_norm:
            hidden_states = np.stack(
                [self.norm(hidden_states[:, i], f"fc_norm.{i}.weight") for i in range(hidden_states.shape[1])], 1
            )
        flat = hidden_states.reshape(len(hidden_states), -1)
        if self.c.norm_before_fc:
            flat = self.norm(flat, "input_norm.weight")
        return flat @ self.t["fc.weight"].T

    def outputs(self, tokens: Any, g: Any) -> Any:
        """Of all entries [n, H], before the norm: tokens [n] and what stands beside them, g [n, H]."""
        d, n = self.c.decoder, len(tokens)
        x = g
        for i in range(d.layers):
            at = f"layers.{i}."
            if i == 0:
                normed = self.norm(x, at + "hidden_norm.weight")
                entered = np.concatenate([self.norm(self.embedding[tokens], at + "input_layernorm.weight"), normed], 1)
                x = normed if self.c.norm_before_residual else x
            else:
                entered = self.norm(x, at + "input_layernorm.weight")
            q, k, v = (self.heads(entered, at, name) for name in "qkv")
            k, v = (np.repeat(a, d.heads // d.kv_heads, 1) for a in (k, v))
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(np.float32(d.head_dim))
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)
            x = x + attended @ self.t[at + "self_attn.o_proj.weight"].T
            inner = self.norm(x, at + "post_attention_layernorm.weight")
            gate, up = (inner @ self.t[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.t[at + "mlp.down_proj.weight"].T
        return x

    def heads(self, x: Any, at: str, name: str) -> Any:
        d = self.c.decoder
        its = (x @ self.t[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(x), -1, d.head_dim)
        if name == "v":
            return its
        if d.qk_norm:
            its = self.norm(its, f"{at}self_attn.{name}_norm.weight")
        angles = np.arange(len(x))[:, None] / d.rope_theta ** (np.arange(0, d.head_dim, 2) / d.head_dim)
        cos, sin = np.cos(angles)[:, None].astype(np.float32), np.sin(angles)[:, None].astype(np.float32)
        a, b = np.split(its, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def logits(self, tokens: Any, hidden_states: Any, path: list[int]) -> Any:
        """[D] after real entries tokens [n] with states [n, T, H] and predicted ones for the tokens of ``path``."""
        tokens, g = list(tokens), self.fused(hidden_states)
        outputs = self.outputs(tokens, g)
        for token in path:
            fed = self.norm(outputs[-1:], "norm.weight") if self.c.norm_output else outputs[-1:]
            tokens, g = [*tokens, token], np.concatenate([g, fed])
            outputs = self.outputs(tokens, g)
        return self.norm(outputs[-1], "norm.weight") @ self.head.T


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
