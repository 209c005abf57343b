"""Medusa-1: heads on the target's last hidden state, each for a token further ahead (Cai et al., arXiv 2401.10774).

A head is residual blocks under the target's own head, which they share and which is not trained; its blocks begin at
zero, so that it begins as the target's head. The state of position i has seen token i; head k says token i + 2 + k.
Names are those of vLLM's ``medusa``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.configs import MedusaConfig
from outpace.errors import ParameterError


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


@dataclass(frozen=True, slots=True)
class Candidates:
    """``tokens`` int64 [B, K, R], target ids by falling probability; ``probability`` [B, K, R] under each head."""

    tokens: Tensor
    probability: Tensor


class MedusaNetwork(nn.Module):
    """Every head's residual blocks; the rows that make logits of their states are handed in."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlock(config) for _ in range(config.heads))

    def forward(self, normed: Tensor) -> Tensor:
        """Every head's states [..., K, h] of the target's normed last state [..., h]."""
        return torch.stack([block(normed) for block in self.blocks], -2)


def candidates(logits: Tensor, ids: Tensor, ranks: int) -> Candidates:
    """The ``ranks`` likeliest tokens of logits [B, K, D] of the target's ids int64 [D]; lower ids first on ties."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :ranks]
    return Candidates(ids[order], logits.softmax(-1).gather(-1, order))


def fill(tree: tuple[tuple[int, ...], ...], found: Candidates) -> tuple[Tensor, Tensor]:
    """A static tree's tokens int64 [B, n] and confidence [B, n], each path's probability, of what heads say.

    ``tree``: paths of ranks, each after its beginning. Raises ParameterError for one that wants more than was found.
    """
    heads, ranks = found.tokens.shape[1:]
    if any(len(path) > heads or max(path) >= ranks for path in tree):
        raise ParameterError(f"the tree has paths beyond {heads} heads of {ranks} candidates: search it anew")
    at = {path: i for i, path in enumerate(tree)}
    tokens, chances = [], list[Tensor]()
    for path in tree:
        own = found.probability[:, len(path) - 1, path[-1]]
        tokens.append(found.tokens[:, len(path) - 1, path[-1]])
        chances.append(own if len(path) == 1 else own * chances[at[path[:-1]]])
    return torch.stack(tokens, 1), torch.stack(chances, 1)
