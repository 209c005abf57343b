"""Parts that the networks share: norm, rotation, feed-forward. Names are those of Hugging Face's Llama."""

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
        self.register_buffer("frequencies", 1.0 / theta**exponents, persistent=False)

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, 1, head_dim] of positions [n], for heads [n, heads, head_dim]."""
        angles = position[:, None].to(self.frequencies.dtype) * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [n, heads, head_dim] at the positions of ``cos``, ``sin`` [n, 1, head_dim]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


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
