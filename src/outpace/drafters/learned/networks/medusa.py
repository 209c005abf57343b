"""Medusa-1: heads on the target's last hidden state, each for a token further ahead (Cai et al., arXiv 2401.10774).

A head is residual blocks under the target's own head, which they share and which is not trained; its blocks begin at
zero, so that it begins as the target's head. The state of position i has seen token i; head k says token i + 2 + k.
Names are those of vLLM's ``medusa``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.configs import MedusaConfig


class ResidualBlock(nn.Module):
    """x + silu(W x), as often as it has layers."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden, config.hidden, bias=config.bias) for _ in range(config.layers)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaNetwork(nn.Module):
    """Every head's residual blocks; the rows that make logits of their states are handed in."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlock(config) for _ in range(config.heads))

    def forward(self, normed: Tensor) -> Tensor:
        """Every head's states [..., K, h] of the target's normed last state [..., h]."""
        return torch.stack([block(normed) for block in self.blocks], -2)
