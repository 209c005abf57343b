"""A small Llama, as a draft model of its own: distilled from the target, served like any other model.

Names are those of Hugging Face's ``LlamaForCausalLM``, or ``Qwen3ForCausalLM`` where query and key heads have norms,
without ``model.``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.configs import Decoder
from outpace.drafters.learned.networks.layers import Layer, Norm, Rope, initialise
from outpace.errors import Argument, ParameterError

Cache = list[tuple[Tensor, Tensor]]  # of each layer: keys and values [B, n, kv_heads, head_dim]


class Student(nn.Module):
    """``embedding``, ``head`` [V, h] are the model's own; one tensor given as both is tied. ``frozen``: they do not
    learn, which is cheaper and lets little data go further."""

    def __init__(self, shape: Decoder, embedding: Tensor, head: Tensor, *, frozen: bool, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.tied = head is embedding
        self.embed_tokens = nn.Parameter(embedding, requires_grad=not frozen)
        self.lm_head = self.embed_tokens if self.tied else nn.Parameter(head, requires_grad=not frozen)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.rope = Rope(shape.head_dim, shape.rope_theta)
        initialise(self, torch.Generator().manual_seed(seed))

    def take(self, layers: Sequence[Mapping[str, Tensor]], norm: Tensor) -> None:
        """Begin as these layers of a target (``q`` .. ``down``, ``attn_norm``, ``ffn_norm``, perhaps ``q_norm``,
        ``k_norm``) under its final ``norm`` [h]. Raises ParameterError for layers of another size or kind."""
        with torch.no_grad():
            self.norm.weight.copy_(norm)
            for i, (layer, given) in enumerate(zip(self.layers, layers, strict=True)):
                attention, mlp = layer.self_attn, layer.mlp
                own = {name: getattr(attention, f"{name}_proj").weight for name in "qkvo"}
                own |= {name: getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")}
                own |= {"attn_norm": layer.input_layernorm.weight, "ffn_norm": layer.post_attention_layernorm.weight}
                if self.shape.qk_norm:
                    own |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
                for name in sorted(own.keys() | given.keys()):
                    if name not in own or name not in given or own[name].shape != given[name].shape:
                        raise ParameterError(
                            f"layer {i} cannot begin as a layer of the target, whose {name} differs: give ",
                            Argument("init", "scratch"),
                        )
                    own[name].copy_(given[name])

    def forward(self, tokens: Tensor, position: Tensor, starts: Sequence[int]) -> Tensor:
        """Normed states [N, h] of packed sequences: ``tokens``, ``position`` int64 [N], ``starts`` B + 1 bounds."""
        lengths = [stop - start for start, stop in pairwise(starts)]

        def attend(i: int, *heads: Tensor) -> Tensor:
            parts = zip(*(t.split(lengths) for t in heads), strict=True)
            return torch.cat([_attend(*part, causal=True) for part in parts])

        return self._normed(tokens, position, attend)

    def step(self, tokens: Tensor, position: int, cache: Cache) -> tuple[Tensor, Cache]:
        """Normed states [B, h] after one token each of B rows of one length, and their cache with it."""
        grown: Cache = []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k[:, None], v[:, None]
            if cache:
                k, v = torch.cat((cache[i][0], k), 1), torch.cat((cache[i][1], v), 1)
            grown.append((k, v))
            return _attend(q[:, None], k, v, causal=False)[:, 0]

        return self._normed(tokens, torch.full((len(tokens),), position, device=tokens.device), attend), grown

    @torch.no_grad()
    def continued(self, prompt: Tensor, count: int, draw: torch.Generator | None = None) -> Tensor:
        """``prompt`` int64 [n] and ``count`` tokens sampled at temperature 1 (``draw`` None: the likeliest)."""
        cache: Cache = []
        sampled: list[Tensor] = []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.append((k[None], v[None]))
            return _attend(q, k, v, causal=True)

        hidden = self._normed(prompt, torch.arange(len(prompt), device=prompt.device), attend)[-1:]
        for i in range(count):
            logits = hidden @ self.lm_head.T
            token = logits.argmax(-1)
            if draw is not None:  # a generator's numbers are the CPU's
                token = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=draw)[:, 0].to(prompt.device)
            sampled.append(token)
            if i + 1 < count:
                hidden, cache = self.step(token, len(prompt) + i, cache)
        return torch.cat((prompt, *sampled))

    def _normed(self, tokens: Tensor, position: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Normed states [n, h]; ``attend(i, q, k, v)`` mixes layer i's heads [n, heads, head_dim]."""
        cos, sin = self.rope(position)
        x = self.embed_tokens[tokens]
        for i, layer in enumerate(self.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            mixed = attend(i, attention.queries(normed, cos, sin), *attention.keys_values(normed, cos, sin))
            x = x + attention.o_proj(mixed.flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: Tensor = self.norm(x)
        return out


def chosen_layers(layers: int, wanted: int, how: str) -> list[int]:
    """Which of ``layers`` layers a student of ``wanted`` begins as; "even" has the first and the last.

    Raises ParameterError when there are not so many.
    """
    if not 1 <= wanted <= layers:
        raise ParameterError(Argument("layers", wanted), f" is out of range: the target has {layers}")
    if how == "first":
        return list(range(wanted))
    if how == "last":
        return list(range(layers - wanted, layers))
    if wanted == 1:
        return [layers - 1]
    return [round(i * (layers - 1) / (wanted - 1)) for i in range(wanted)]


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """[..., n, heads, d] of ``q`` [..., n, heads, d] and ``k``, ``v`` [..., m, kv_heads, d]."""
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[-3] != k.shape[-3])
    return mixed.transpose(-3, -2)
