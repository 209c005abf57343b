"""Parts that the networks share: norm, rotation, feed-forward, attention. Names are those of Hugging Face's Llama."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.configs import Decoder


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

    def __init__(self, its: Decoder) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(its.hidden, its.ffn, bias=False)
        self.up_proj = nn.Linear(its.hidden, its.ffn, bias=False)
        self.down_proj = nn.Linear(its.ffn, its.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Rope(nn.Module):
    """Rotation of halves by position (Su et al., arXiv 2104.09864), as Hugging Face's Llama pairs dimensions."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.frequencies: Tensor
        self.register_buffer("frequencies", theta**-exponents, persistent=False)

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, 1, head_dim / 2] of positions [n], for heads [n, heads, head_dim]."""
        angles = position[:, None, None].to(self.frequencies.dtype) * self.frequencies
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [n, heads, head_dim] at the positions of ``cos``, ``sin`` [n, 1, head_dim / 2], in their own type."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Projections, and norms of query and key heads where the shape has them; states have ``reads`` numbers, else h."""

    def __init__(self, its: Decoder, reads: int | None = None) -> None:
        super().__init__()
        inner, kv = its.heads * its.head_dim, its.kv_heads * its.head_dim
        reads = reads or its.hidden
        self.head_dim = its.head_dim
        self.q_proj = nn.Linear(reads, inner, bias=False)
        self.k_proj = nn.Linear(reads, kv, bias=False)
        self.v_proj = nn.Linear(reads, kv, bias=False)
        self.o_proj = nn.Linear(inner, its.hidden, bias=False)
        self.q_norm = Norm(its.head_dim, its.eps) if its.qk_norm else None
        self.k_norm = Norm(its.head_dim, its.eps) if its.qk_norm else None

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of states [n, reads]: keys, rotated, and values, both [n, kv_heads, head_dim]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return rotate(keys, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of states [n, reads]: [n, heads, head_dim]."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(queries if self.q_norm is None else self.q_norm(queries), cos, sin)


class Layer(nn.Module):
    """A decoder layer's parts."""

    def __init__(self, its: Decoder) -> None:
        super().__init__()
        self.self_attn = Attention(its)
        self.mlp = Mlp(its)
        self.input_layernorm = Norm(its.hidden, its.eps)
        self.post_attention_layernorm = Norm(its.hidden, its.eps)


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
