"""Parts that the networks share: norm, rotation, feed-forward, attention. Names are those of Hugging Face's Llama."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.layouts import Decoder


class Norm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, self.weight.dtype))  # under autocast, x is the narrower
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer, arXiv 2002.05202)."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Rope(nn.Module):
    """Rotation of halves by position (Su et al., arXiv 2104.09864), as Hugging Face's Llama pairs dimensions.

    Angles are float32 whatever type the weights take: half precision has too few bits for them.
    """

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        rope = shape.rope
        self.scale, self.frequencies = rope.scale, torch.from_numpy(rope.frequencies)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        super()._apply(fn, recurse)
        self.frequencies = self.frequencies.to(fn(self.frequencies).device)
        return self

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, head_dim / 2] of positions [...], for heads [..., heads, head_dim]."""
        angles = position[..., None, None].float() * self.frequencies
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., heads, head_dim] at the positions of ``cos``, ``sin`` [..., 1, head_dim / 2], in their own type."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Projections, and norms of query and key heads where the shape has them; states have ``reads`` numbers, else h."""

    def __init__(self, shape: Decoder, reads: int | None = None) -> None:
        super().__init__()
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        reads = reads or shape.hidden
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(reads, inner, bias=False)
        self.k_proj = nn.Linear(reads, kv, bias=False)
        self.v_proj = nn.Linear(reads, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_dim, shape.eps) if shape.qk_norm else None

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of states [..., reads]: keys, rotated, and values, both [..., kv_heads, head_dim]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return rotate(keys, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of states [..., reads]: rotated queries [..., heads, head_dim]."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(queries if self.q_norm is None else self.q_norm(queries), cos, sin)


class Layer(nn.Module):
    """A decoder layer's parts."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)


def initialise(module: nn.Module, draw: torch.Generator | None = None, std: float = 0.02) -> None:
    """Every matrix from a normal distribution; what adds to the residual begins as nothing."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            if name.endswith(("o_proj", "down_proj")):
                nn.init.zeros_(each.weight)
            else:
                nn.init.normal_(each.weight, std=std, generator=draw)
            if each.bias is not None:
                nn.init.zeros_(each.bias)
