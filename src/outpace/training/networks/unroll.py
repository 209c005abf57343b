"""EAGLE unrolled for training: attention of a training-time test, written out with its gradient.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.2) unrolls a drafter: at step s the entry that follows anchor a
by s sees the real entries up to a and the predicted entries 1 .. s of this anchor. Everything is indexed by anchor, so
step s's own keys are a diagonal, and hidden states are never shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.drafters.learned.networks.layers import rotate

Span = tuple[int, int, int, int]  # a sequence's anchors [m0, m1) and real entries [n0, n1)


class AnchoredAttention(torch.autograd.Function):
    """One sequence after the other, each a few batched products; nothing is padded."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [M, H, d]
        k: Tensor,  # [N, KV, d] of real entries
        v: Tensor,
        own_k: Tensor,  # [M, s, KV, d] of the anchor's predicted entries, oldest first
        own_v: Tensor,
        spans: Sequence[Span],
        anchors: Tensor,  # int64 [M]: packed index of each anchor
    ) -> Tensor:
        _, heads, dim = q.shape
        kv_heads, own = k.shape[1], own_k.shape[1]
        group, scale = heads // kv_heads, dim**-0.5
        out = torch.empty_like(q)
        probabilities = []
        for m0, m1, n0, n1 in spans:
            m, n = m1 - m0, n1 - n0
            if m == 0:
                probabilities.append(q.new_zeros(0))
                continue
            queries = (q[m0:m1].view(m, kv_heads, group, dim).permute(1, 2, 0, 3) * scale).reshape(kv_heads, -1, dim)
            scores = q.new_empty(kv_heads, group, m, n + own)
            seen = torch.matmul(queries, k[n0:n1].permute(1, 2, 0)).view(kv_heads, group, m, n)
            later = torch.arange(n0, n1, device=q.device) > anchors[m0:m1, None]
            scores[..., :n] = seen.masked_fill_(later, float("-inf"))
            if own:
                keys = own_k[m0:m1].permute(2, 0, 1, 3).unsqueeze(1)  # [KV, 1, m, s, d]
                scores[..., n:] = (queries.view(kv_heads, group, m, 1, dim) * keys).sum(-1)
            p = torch.softmax(scores, -1).to(q.dtype)  # a card's autocast makes float32 of it
            mixed = torch.matmul(p[..., :n].reshape(kv_heads, -1, n), v[n0:n1].transpose(0, 1))
            if own:
                values = own_v[m0:m1].permute(2, 0, 1, 3).unsqueeze(1)
                mixed = mixed + (p[..., n:, None] * values).sum(-2).view(kv_heads, -1, dim)
            out[m0:m1] = mixed.view(kv_heads, group, m, dim).permute(2, 0, 1, 3).reshape(m, heads, dim)
            probabilities.append(p)
        ctx.save_for_backward(q, k, v, own_k, own_v, *probabilities)
        ctx.spans = spans
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        q, k, v, own_k, own_v, *probabilities = ctx.saved_tensors
        _, heads, dim = q.shape
        kv_heads, own = k.shape[1], own_k.shape[1]
        group, scale = heads // kv_heads, dim**-0.5
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        down_k, down_v = torch.zeros_like(own_k), torch.zeros_like(own_v)
        for (m0, m1, n0, n1), p in zip(ctx.spans, probabilities, strict=True):
            m, n = m1 - m0, n1 - n0
            if m == 0:
                continue
            g = grad[m0:m1].view(m, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
            queries = (q[m0:m1].view(m, kv_heads, group, dim).permute(1, 2, 0, 3) * scale).reshape(kv_heads, -1, dim)
            dp = torch.empty_like(p)
            dp[..., :n] = torch.matmul(g, v[n0:n1].permute(1, 2, 0)).view(kv_heads, group, m, n)
            if own:
                keys, values = own_k[m0:m1].permute(2, 0, 1, 3), own_v[m0:m1].permute(2, 0, 1, 3)
                dp[..., n:] = (g.view(kv_heads, group, m, 1, dim) * values.unsqueeze(1)).sum(-1)
            ds = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p)
            ds_seen = ds[..., :n].reshape(kv_heads, -1, n)
            dqueries = torch.matmul(ds_seen, k[n0:n1].transpose(0, 1))
            dk[n0:n1] = torch.matmul(ds_seen.transpose(1, 2), queries).transpose(0, 1)
            dv[n0:n1] = torch.matmul(p[..., :n].reshape(kv_heads, -1, n).transpose(1, 2), g).transpose(0, 1)
            if own:
                ds_own = ds[..., n:, None]  # [KV, G, m, s, 1]
                dqueries = dqueries + (ds_own * keys.unsqueeze(1)).sum(-2).view(kv_heads, -1, dim)
                down_k[m0:m1] = (ds_own * queries.view(kv_heads, group, m, 1, dim)).sum(1).permute(1, 2, 0, 3)
                down_v[m0:m1] = (p[..., n:, None] * g.view(kv_heads, group, m, 1, dim)).sum(1).permute(1, 2, 0, 3)
            dq[m0:m1] = (dqueries.view(kv_heads, group, m, dim) * scale).permute(2, 0, 1, 3).reshape(m, heads, dim)
        return dq, dk, dv, down_k, down_v, None, None


class PickRows(torch.autograd.Function):
    """``values[index]`` for distinct indices: backward is a copy, not a sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(values)
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        full = grads[0].new_zeros(ctx.rows, *grads[0].shape[1:])
        return full.index_copy_(0, index, grads[0]), None


def pick(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` [m, ...] for distinct ``index`` int64 [m]."""
    picked: Tensor = PickRows.apply(values, index)
    return picked


def unroll(
    network: EagleNetwork,
    hidden_states: Tensor,  # [N, T, h] of the target
    embedded: Tensor,  # [N, h]: the tokens' embeddings
    position: Tensor,  # int64 [N]
    starts: Sequence[int],
    anchors: Sequence[Tensor],  # of each step, int64 [M_s] ascending, each within the one before
) -> list[Tensor]:
    """The normed outputs [M_s, h] of each step; at step s, ``anchors[s]`` + s is an entry and reads token + 1.

    Step 0 has all real entries that a later query may see, so ``anchors[0]`` is every position but the sequences' last.
    Later ones may be fewer.
    """
    layer, shape = network.layer, network.config.decoder
    weight = torch.cat([p.weight for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)])
    of_token, of_state = weight[:, : shape.hidden], weight[:, shape.hidden :]
    read = F.linear(layer.input_layernorm(embedded), of_token)  # [N, q + 2 kv]: once, not once a step
    bounds = torch.tensor(starts, device=position.device)
    real = anchors[0]
    inner = torch.searchsorted(real, bounds).tolist()
    g = network.fuse(pick(hidden_states, real))
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
        q, k, v = _project(network, pick(read, at + s + 1) + F.linear(normed, of_state), position[at] + s)
        if s:
            own_k.append(k)
            own_v.append(v)
        else:
            first_k, first_v = k, v
        outer = torch.searchsorted(at, bounds).tolist()
        spans: list[Span] = list(zip(outer, outer[1:], inner, inner[1:], strict=False))
        places = torch.searchsorted(real, at)
        mixed = AnchoredAttention.apply(q, first_k, first_v, _stack(own_k, k), _stack(own_v, v), spans, places)
        output, g = network.leave(network.residual(g, normed), mixed)
        outputs.append(output)
    return outputs


def _project(network: EagleNetwork, qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [n, heads, d], of [n, q + 2 kv]."""
    shape, attention = network.config.decoder, network.layer.self_attn
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    both, v = heads.split([shape.heads + shape.kv_heads, shape.kv_heads], 1)
    if attention.q_norm is not None and attention.k_norm is not None:
        both = torch.cat((attention.q_norm(both[:, : shape.heads]), attention.k_norm(both[:, shape.heads :])), 1)
    turned = rotate(both, *network.rope(position))
    return turned[:, : shape.heads], turned[:, shape.heads :], v


def _stack(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts, 1) if parts else like.new_zeros(len(like), 0, *like.shape[1:])
