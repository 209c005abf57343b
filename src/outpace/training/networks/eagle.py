"""EAGLE-3's network with the norms of 3.1 (arXiv 2503.01840, 2605.09992): one decoder layer over token and features.

Its parameters have the names of speculators 0.9, so ``state_dict()`` is what a checkpoint holds, less the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outpace.drafters.learned.configs import Decoder, EagleConfig
from outpace.drafters.learned.networks.layers import Attention, Mlp, Norm, Rope, rotate
from outpace.errors import ParameterError
from outpace.training.networks.attention import AnchoredAttention, Span, pick


class EagleLayer(nn.Module):
    """Attention reads 2 h numbers: the token's, then the features'."""

    def __init__(self, its: Decoder) -> None:
        super().__init__()
        self.input_layernorm = Norm(its.hidden, its.eps)
        self.hidden_norm = Norm(its.hidden, its.eps)
        self.post_attention_layernorm = Norm(its.hidden, its.eps)
        self.self_attn = Attention(its, 2 * its.hidden)
        self.mlp = Mlp(its)


class EagleNetwork(nn.Module):
    """``unroll`` for training, ``feed`` for one step of inference; they compute the same.

    Raises ParameterError for a shape that EAGLE-3 does not have.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        its = config.decoder
        if its.layers != 1 or its.qk_norm:
            raise ParameterError(f"EAGLE-3 has one layer without q/k norms, not {its.layers}: use another method")
        if config.norm_before_fc and config.fc_norm:
            raise ParameterError("norm_before_fc and fc_norm exclude one another: give one of them")
        self.config = config
        width = len(config.taps) * its.hidden
        self.fc = nn.Linear(width, its.hidden, bias=False)
        self.fc_norm = nn.ModuleList(Norm(its.hidden, its.eps) for _ in config.taps) if config.fc_norm else None
        self.input_norm = Norm(width, its.eps) if config.norm_before_fc else None
        self.layers = nn.ModuleList([EagleLayer(its)])
        self.norm = Norm(its.hidden, its.eps)
        self.rope = Rope(its.head_dim, its.rope_theta)

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def fuse(self, taps: Tensor) -> Tensor:
        """g [N, h] of the target's taps [N, T, h]."""
        if self.fc_norm is not None:
            taps = torch.stack([norm(taps[:, i]) for i, norm in enumerate(self.fc_norm)], 1)
        flat = taps.flatten(1)
        if self.input_norm is not None:
            flat = self.input_norm(flat)
        g: Tensor = self.fc(flat)
        return g

    def unroll(
        self,
        taps: Tensor,  # [N, T, h]
        embedded: Tensor,  # [N, h]: the tokens' embeddings
        position: Tensor,  # int64 [N]
        starts: Sequence[int],
        anchors: Sequence[Tensor],  # of each step, int64 [M_s] ascending, each within the one before
    ) -> list[Tensor]:
        """The normed outputs [M_s, h] of each step; at step s, ``anchors[s]`` + s is an entry and reads token + 1.

        Step 0 has all real entries that a later query may see, so ``anchors[0]`` is every position but the sequences'
        last. Later ones may be fewer.
        """
        layer, its = self.layer, self.config.decoder
        weight = torch.cat([p.weight for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)])
        of_token, of_state = weight[:, : its.hidden], weight[:, its.hidden :]
        read = F.linear(layer.input_layernorm(embedded), of_token)  # [N, q + 2 kv]
        bounds = torch.tensor(starts, device=position.device)
        real = anchors[0]
        inner = torch.searchsorted(real, bounds).tolist()
        g = self.fuse(pick(taps, real))
        outputs: list[Tensor] = []
        own_k: list[Tensor] = []
        own_v: list[Tensor] = []  # of the steps after the first, by anchor
        first_k = first_v = g
        for s, at in enumerate(anchors):
            if s:
                kept = torch.searchsorted(anchors[s - 1], at)
                g = pick(g, kept)
                own_k, own_v = [pick(k, kept) for k in own_k], [pick(v, kept) for v in own_v]
            normed = layer.hidden_norm(g)
            q, k, v = self._project(pick(read, at + s + 1) + F.linear(normed, of_state), position[at] + s)
            if s:
                own_k.append(k)
                own_v.append(v)
            else:
                first_k, first_v = k, v
            outer = torch.searchsorted(at, bounds).tolist()
            spans: list[Span] = list(zip(outer, outer[1:], inner, inner[1:], strict=False))
            places = torch.searchsorted(real, at)
            mixed = AnchoredAttention.apply(q, first_k, first_v, _stack(own_k, k), _stack(own_v, v), spans, places)
            hidden = self._finish(normed if self.config.norm_before_residual else g, mixed)
            normed_out = self.norm(hidden)
            outputs.append(normed_out)
            g = normed_out if self.config.norm_output else hidden
        return outputs

    def feed(
        self, g: Tensor, embedded: Tensor, position: Tensor, past: tuple[Tensor, Tensor], parent_mask: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Entries as serving runs them: features [n, h], embeddings [n, h], positions [n] of one row.

        ``past``: keys and values [m, KV, d]; ``parent_mask`` bool [n, m + n]: what each entry sees. Returns the normed
        outputs [n, h], the next entries' features [n, h], and the longer past.
        """
        layer, its = self.layer, self.config.decoder
        normed = layer.hidden_norm(g)
        both = torch.cat([layer.input_layernorm(embedded), normed], -1)
        attention = layer.self_attn
        q, k, v = self._project(
            torch.cat([attention.q_proj(both), attention.k_proj(both), attention.v_proj(both)], -1), position
        )
        keys, values = torch.cat([past[0], k]), torch.cat([past[1], v])
        group = its.heads // its.kv_heads
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.repeat_interleave(group, 1).transpose(0, 1),
            values.repeat_interleave(group, 1).transpose(0, 1),
            attn_mask=parent_mask,
        ).transpose(0, 1)
        hidden = self._finish(normed if self.config.norm_before_residual else g, mixed)
        out = self.norm(hidden)
        return out, out if self.config.norm_output else hidden, (keys, values)

    def _project(self, qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [n, heads, d], of [n, q + 2 kv]."""
        its = self.config.decoder
        heads = qkv.view(len(qkv), its.heads + 2 * its.kv_heads, its.head_dim)
        turned = rotate(heads[:, : its.heads + its.kv_heads], *self.rope(position))
        return turned[:, : its.heads], turned[:, its.heads :], heads[:, its.heads + its.kv_heads :]

    def _finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        layer = self.layer
        hidden = residual + layer.self_attn.o_proj(mixed.flatten(1))
        after: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return after


def _stack(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts, 1) if parts else like.new_zeros(len(like), 0, *like.shape[1:])
