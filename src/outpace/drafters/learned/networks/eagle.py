"""EAGLE-3's network with the norms of 3.1 (arXiv 2503.01840, 2605.09992): one decoder layer over token and features.

Training unrolls it (training/methods/eagle.py), the torch runtime drafts with it (torch_eagle.py). Its parameters
have the names of speculators 0.9, so ``state_dict()`` is what a checkpoint holds, less the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outpace.drafters.learned.configs import Decoder, EagleConfig
from outpace.drafters.learned.networks.layers import Attention, Mlp, Norm, Rope
from outpace.errors import ParameterError


class EagleLayer(nn.Module):
    """Attention reads 2 h numbers: the token's, then the features'."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.mlp = Mlp(shape)


class EagleNetwork(nn.Module):
    """The parts of an entry's forward; who calls them decides what the entry attends to.

    An entry reads features g [..., h] and the embedding [..., h] of the token after it. Raises ParameterError for a
    shape that EAGLE-3 does not have.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        shape = config.decoder
        if shape.layers != 1:
            raise ParameterError(f"EAGLE-3 has one layer, not {shape.layers}: use another method")
        if config.norm_before_fc and config.fc_norm:
            raise ParameterError("norm_before_fc and fc_norm exclude one another: give one of them")
        self.config = config
        width = len(config.hidden_layers) * shape.hidden
        self.fc = nn.Linear(width, shape.hidden, bias=False)
        norms = (Norm(shape.hidden, shape.eps) for _ in config.hidden_layers)
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.input_norm = Norm(width, shape.eps) if config.norm_before_fc else None
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.rope = Rope(shape.head_dim, shape.rope_theta)

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def fused_input(self, hidden_states: Tensor) -> Tensor:
        """What ``fc`` reads [n, T h] of the target's hidden states [n, T, h]."""
        if self.fc_norm is not None:
            hidden_states = torch.stack([norm(hidden_states[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        flat = hidden_states.flatten(1)
        return flat if self.input_norm is None else self.input_norm(flat)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Features g [n, h] of the target's hidden states [n, T, h]."""
        g: Tensor = self.fc(self.fused_input(hidden_states))
        return g

    def enter(self, embedded: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2 h], and the residual [..., h]."""
        normed = self.layer.hidden_norm(g)
        return torch.cat([self.layer.input_layernorm(embedded), normed], -1), self.residual(g, normed)

    def residual(self, g: Tensor, normed: Tensor) -> Tensor:
        """What the layer adds to: g, or g after ``hidden_norm``."""
        return normed if self.config.norm_before_residual else g

    def leave(self, residual: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """From the residual [..., h] and attention's [..., heads, head_dim]: the output [..., h] after ``norm``, which
        the head reads, and the features [..., h] of the next entry, which the network itself predicts."""
        hidden = residual + self.layer.self_attn.o_proj(mixed.flatten(-2))
        hidden = hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden
