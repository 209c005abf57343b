"""Parts that the networks share: norm, rotation, feed-forward, attention. Names are those of Hugging Face's Llama."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.config import Decoder


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
    """down(silu(gate(x)) * up(x)), without biases (Shazeer, arXiv 2002.05202); Gemma's: gelu for silu."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self._gelu = shape.gemma

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh") if self._gelu else F.silu(gate)
        out: Tensor = self.down_proj(gate * self.up_proj(x))
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
    """Projections, and norms of heads where the shape has them; states have ``reads`` numbers, else h."""

    def __init__(self, shape: Decoder, reads: int | None = None) -> None:
        super().__init__()
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        reads = reads or shape.hidden
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(reads, inner, bias=False)
        self.k_proj = nn.Linear(reads, kv, bias=False)
        self.v_proj: Any = nn.Linear(reads, kv, bias=False) if shape.values else None
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_dim, shape.eps) if shape.qk_norm else None
        self._value_eps = shape.eps if shape.gemma else None
        self._gain = math.sqrt(shape.head_dim) if shape.gemma else 1.0  # undoes the scale of scores

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Of states [..., reads]: keys, rotated, and values, both [..., kv_heads, head_dim]."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = keys if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self._value_eps is not None:
            values = F.rms_norm(values, (self.head_dim,), None, self._value_eps)
        return rotate(keys if self.k_norm is None else self.k_norm(keys), cos, sin), values

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of states [..., reads]: rotated queries [..., heads, head_dim]."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(queries if self.q_norm is None else self.q_norm(queries), cos * self._gain, sin * self._gain)


class LocalConv(nn.Module):
    """DFlash2's convolutions of what enters and what leaves a part of a layer, over a block's slots: a slot sees those
    before it. Kernels are a base and what the entering states make of them, the same for a group of channels."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        taps, self._group = shape.conv
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, shape.hidden))
        self.kernel_projection = nn.Linear(shape.hidden, 2 * taps * shape.hidden // self._group, bias=False)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of states [A, K, h]: convolved, and the kernels [A, K, taps, h] of what leaves."""
        own = self.kernel_projection(x).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        kernels = own.repeat_interleave(self._group, -1) + self.base_kernel
        return self.leave(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    @staticmethod
    def leave(x: Tensor, kernels: Tensor) -> Tensor:
        """States [A, K, h], convolved by ``kernels`` [A, K, taps, h]."""
        before = [F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]] for tap in range(kernels.shape[-2])]
        return (torch.stack(before, -2) * kernels).sum(-2)


class Layer(nn.Module):
    """A decoder layer's parts; ``reads``: how many numbers attention reads, else h."""

    def __init__(self, shape: Decoder, reads: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(shape, reads)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self._convolves, self._gemma = shape.conv[0] > 0, shape.gemma
        if self._convolves:
            self.attention_conv, self.mlp_conv = LocalConv(shape), LocalConv(shape)
        if self._gemma:
            self.pre_feedforward_layernorm = Norm(shape.hidden, shape.eps)
            self.post_feedforward_layernorm = Norm(shape.hidden, shape.eps)
            self.layer_scalar = nn.Parameter(torch.ones(1))

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What attention reads of states [..., h], and the kernels of what leaves it."""
        normed = self.input_layernorm(x)
        return self.attention_conv.enter(normed) if self._convolves else (normed, None)

    def leave(self, x: Tensor, mixed: Tensor, kernels: Tensor | None = None) -> Tensor:
        """What the layer makes of states [..., h], of which attention made ``mixed`` [..., heads * head_dim]."""
        added = self.self_attn.o_proj(mixed)
        if kernels is not None:
            added = self.attention_conv.leave(added, kernels)
        x = x + (self.post_attention_layernorm(added) if self._gemma else added)
        normed = (self.pre_feedforward_layernorm if self._gemma else self.post_attention_layernorm)(x)
        if kernels is not None:
            normed, kernels = self.mlp_conv.enter(normed)
        added = self.mlp(normed)
        if kernels is not None:
            added = self.mlp_conv.leave(added, kernels)
        if not self._gemma:
            return x + added
        left: Tensor = (x + self.post_feedforward_layernorm(added)) * self.layer_scalar
        return left


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
