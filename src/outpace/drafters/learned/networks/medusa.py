"""Medusa-1: heads on the target's last hidden state, each for a token further ahead (Cai et al., arXiv 2401.10774).

A head is residual blocks under the target's own head, which they share and which is not trained; its blocks begin at
zero, so that it begins as the target's head. The state of position i has seen token i; head k says token i + 2 + k.
Names are those of vLLM's ``medusa``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.common.arrays import F32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import MedusaConfig
from outpace.drafters.learned.medusa import HeadsNetwork, Path
from outpace.drafters.learned.networks.beside import Shared
from outpace.models.base import Model


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


class TorchMedusa(HeadsNetwork):
    """Heads."""

    def __init__(self, target: Model, checkpoint: Checkpoint, tree: Sequence[Path]) -> None:
        config = checkpoint.config
        assert isinstance(config, MedusaConfig)
        self._shared = Shared(target, checkpoint)
        super().__init__(self._shared.ids, config.heads, tree)
        self._network = self._shared.filled(MedusaNetwork(config), checkpoint)
        self._names = [f"lm_heads.{k}.weight" if config.own_heads else "lm_head.weight" for k in range(config.heads)]

    def logits(self, states: Sequence[Any]) -> F32:
        with torch.no_grad():
            out = self._network(self._shared.parts.norm(torch.stack(list(states))))
            logits = torch.stack([self._shared.logits(out[:, k], name) for k, name in enumerate(self._names)], 1)
            found: F32 = logits.float().cpu().numpy()
            return found
