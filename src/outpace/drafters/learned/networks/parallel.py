"""A block of tokens from one small forward: DSpark (arXiv 2607.05147) on DFlash's decoder (arXiv 2602.06036).

The block's first slot is the anchor, the last token that is known, the others are mask tokens; slot k says what follows
the anchor by k + 1. Slots see each other both ways, and the target's hidden states before the anchor, which every layer
reads as keys and values of its own. A low-rank Markov head adds what the token before makes likely, a confidence
head says how likely a slot is to be accepted. Names and arithmetic are those of speculators 0.9's ``dspark``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import ParallelConfig
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.networks.beside import Shared, Slab, spans
from outpace.drafters.learned.networks.layers import Attention, Layer, Norm, Rope, initialise
from outpace.drafters.learned.networks.trees import grown
from outpace.drafters.learned.parallel import NEVER, BlockNetwork
from outpace.exact.drafts import Drafts
from outpace.models.base import Model
from outpace.models.torch.upload import uploaded

Context = list[tuple[Tensor, Tensor]]  # of each layer: keys and values [n, kv_heads, head_dim] of n positions


def attend(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, seen: Tensor, window: int = 0,
    causal: bool = False, anchored: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of A blocks of K slots beside one context.

    ``q`` [A, K, heads, d]; ``k``, ``v`` [A, K, kv_heads, d] of the blocks; ``context_k``, ``context_v``
    [L, kv_heads, d]; ``seen`` int64 [A]: the first so many positions are seen, or of these the last of a ``window``:
    see ``ParallelConfig``. Returns [A, K, heads * d].
    """
    blocks, slots, heads, d = q.shape
    groups, length = k.shape[2], len(context_k)
    rows = slots * heads // groups
    q = q.view(blocks, slots, groups, heads // groups, d).permute(2, 0, 1, 3, 4) * d**-0.5
    q = q.reshape(groups, blocks, rows, d)
    far = (q.flatten(1, 2) @ context_k.permute(1, 2, 0)).view(groups, blocks, rows, length)
    at, slot = torch.arange(length, device=q.device), torch.arange(slots, device=q.device)
    hidden = (at >= seen[:, None])[:, None].expand(-1, slots, -1)  # [A, K, L]
    near = q @ k.permute(2, 0, 3, 1)
    if window:
        ends = seen[:, None] + (torch.full_like(slot, -1) if anchored else slot)
        hidden = hidden | (at <= ends[..., None] - window)
        unseen = causal * (slot > slot[:, None]) | (not anchored) * (slot <= slot[:, None] - window)
        near = near.masked_fill(unseen.repeat_interleave(heads // groups, 0), -torch.inf)
    far = far.masked_fill(hidden.repeat_interleave(heads // groups, 1), -torch.inf)
    scores = torch.cat((far, near), -1)
    far, near = scores.softmax(-1).split((length, slots), -1)
    out = (far.flatten(1, 2) @ context_v.transpose(0, 1)).view(groups, blocks, rows, d) + near @ v.permute(2, 0, 1, 3)
    return out.view(groups, blocks, slots, heads // groups, d).permute(1, 2, 0, 3, 4).reshape(blocks, slots, -1)


class MarkovHead(nn.Module):
    """What the token before adds to the logits: ``markov_w2`` of ``markov_w1(token)``, behind a gate that the slot's
    state opens, or of that and what the slots before have left (``ParallelConfig.markov``)."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.decoder.hidden
        self.rank = rank
        self.markov_w1 = nn.Embedding(config.vocab, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab, bias=False)
        if config.markov == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        elif config.markov == "selector":
            self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, before: Tensor, normed: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """What is added [..., D] behind tokens whose embeddings are ``before`` [..., rank], to slots of normed states
        [..., h]; and what these leave [..., rank], where those before have left ``left``."""
        reads = before
        if hasattr(self, "gate_proj"):
            reads = torch.sigmoid(self.gate_proj(torch.cat((normed, before), -1))) * before
        elif hasattr(self, "hidden_projection"):
            reads = before * self.hidden_projection(normed)
        elif hasattr(self, "joint_proj"):
            gate, candidate, out = self.joint_proj(torch.cat((left, before, normed), -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            left, reads = gate * left + (1 - gate) * torch.tanh(candidate), torch.tanh(out)
        return self.markov_w2(reads), left


class ConfidenceHead(nn.Module):
    """The logit of being accepted."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.decoder.hidden + config.confidence_markov * config.markov_rank, 1)


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """What B rows' blocks say. ``tokens`` int64 [B, K], target ids; ``confidence`` [B, K]: the chance that a slot is
    accepted when those before it are; ``logits`` [B, K, D] with the Markov head's share."""

    tokens: Tensor
    confidence: Tensor
    logits: Tensor


class ParallelNetwork(nn.Module):
    """DSpark's drafter, less what it shares with its target: embedding and head, which are handed in."""

    def __init__(self, config: ParallelConfig, seed: int = 0) -> None:
        super().__init__()
        decoder = config.decoder
        self.config = config
        self.fc = nn.Linear(len(config.hidden_layers) * decoder.hidden, decoder.hidden, bias=False)
        self.hidden_norm = Norm(decoder.hidden, decoder.eps)
        self.layers = nn.ModuleList(Layer(decoder) for _ in range(decoder.layers))
        self.norm = Norm(decoder.hidden, decoder.eps)
        self.rope = Rope(decoder)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        draw = torch.Generator().manual_seed(seed)
        initialise(self, draw)
        with torch.no_grad():
            self.fc.weight[:, -decoder.hidden :] += torch.eye(decoder.hidden)  # the highest layer passes through
            if self.markov_head is not None:
                nn.init.normal_(self.markov_head.markov_w1.weight, std=0.01, generator=draw)

    @property
    def slots(self) -> int:
        """Tokens that a block gives: K."""
        return self.config.block - (not self.config.sample_from_anchor)

    def context(self, hidden_states: Tensor, position: Tensor) -> Context:
        """Every layer's keys and values of the target's hidden states [n, T, h] at positions int64 [n]."""
        fused = self.hidden_norm(self.fc(hidden_states.flatten(1)))
        cos, sin = self.rope(position)
        return [layer.self_attn.keys_values(fused, cos, sin) for layer in self.layers]

    def inputs(self, anchor: Tensor) -> Tensor:
        """What stands in blocks with anchors int64 [A]: tokens [A, block]."""
        tokens = anchor[:, None].repeat(1, self.config.block)
        tokens[:, 1:] = self.config.mask_token
        return tokens

    def blocks(self, embedded: Tensor, position: Tensor, contexts: Sequence[Context], seen: Sequence[Tensor]) -> Tensor:
        """Normed states [A, K, h] of A blocks' slots.

        ``embedded`` [A, block, h]: the embeddings of ``inputs``; ``position`` int64 [A]: where the anchors stand. The
        blocks lie beside ``contexts`` in turn: ``len(seen[b])`` of them beside context b, of which the a-th sees the
        first ``seen[b][a]`` positions.
        """
        size = self.config.block
        x = embedded
        cos, sin = self.rope(position[:, None] + torch.arange(size, device=position.device))
        counts = [len(limits) for limits in seen]
        for i, layer in enumerate(self.layers):
            attention: Attention = layer.self_attn
            normed, kernels = layer.enter(x)
            k, v = attention.keys_values(normed, cos, sin)
            q = attention.queries(normed, cos, sin)
            parts = zip(q.split(counts), k.split(counts), v.split(counts), contexts, seen, strict=True)
            window, causal, anchored = self.config.decoder.window(i), self.config.causal, self.config.anchored
            found = [
                attend(a, b, c, *context[i], limits, window, causal, anchored) for a, b, c, context, limits in parts
            ]
            x = layer.leave(x, torch.cat(found), kernels)
        normed_out: Tensor = self.norm(x if self.config.sample_from_anchor else x[:, 1:])
        return normed_out

    def before(self, tokens: Tensor) -> Tensor | None:
        """The Markov head's embedding [..., rank] of the tokens before each slot; None without that head."""
        if self.markov_head is None:
            return None
        found: Tensor = self.markov_head.markov_w1(tokens)
        return found

    def confidence(self, normed: Tensor, before: Tensor | None) -> Tensor | None:
        """Logits [...] of being accepted, of normed states [..., h]; None without that head."""
        if self.confidence_head is None:
            return None
        reads = before is not None and self.config.confidence_markov
        found: Tensor = self.confidence_head.proj(torch.cat((normed, before), -1) if reads else normed)
        return found.squeeze(-1)

    @torch.no_grad()
    def decide(self, anchor: Tensor, normed: Tensor, logits: Tensor, ids: Tensor) -> BlockDraft:
        """From normed states [B, K, h] to chains of the likeliest tokens, the lowest id on ties, slot by slot.

        ``anchor`` int64 [B]; ``logits`` [B, K, D]: the head's, of ``ids`` int64 [D], the target's ids of the draft
        vocabulary, ascending. Without a confidence head the drafter's own probability stands for it.
        """
        token, tokens, sure = anchor, [], []
        biased, left = logits if self.markov_head is None else logits.clone(), self.nothing(anchor)
        for slot in range(self.slots):
            bias, chance, left = self.after(token, normed[:, slot], left)
            found = biased[:, slot]
            if bias is not None:
                found += bias
            index = found.argmax(-1)
            if chance is None:
                chance = found.softmax(-1).gather(-1, index[:, None])[:, 0]
            sure.append(chance)
            token = ids[index]
            tokens.append(token)
        return BlockDraft(torch.stack(tokens, 1), torch.stack(sure, 1), biased)

    def nothing(self, anchor: Tensor) -> Tensor:
        """What no slot has left behind anchors [B]: [B, rank]."""
        return self.fc.weight.new_zeros(*anchor.shape, self.config.markov_rank)

    def after(self, token: Tensor, normed: Tensor, left: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Of slots of normed states [..., h] behind tokens int64 [...]: what their logits get [..., D], how likely they
        are to be accepted [...], and what they leave; None without the head that says so."""
        before, bias = self.before(token), None
        if before is not None and self.markov_head is not None:
            bias, left = self.markov_head(before, normed, left)
        chance = self.confidence(normed, before)
        return bias, None if chance is None else chance.sigmoid(), left

    @torch.no_grad()
    def logits(
        self,
        anchor: Tensor,
        position: Tensor,
        contexts: Sequence[Context],
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Normed states [B, K, h] and the head's logits [B, K, D] of such blocks; NEVER of what is no candidate."""
        tokens = self.inputs(anchor)
        embedded = embed(tokens.flatten()).view(*tokens.shape, -1)
        seen = [torch.tensor([len(context[0][0])], device=anchor.device) for context in contexts]
        normed = self.blocks(embedded, position, contexts, seen)
        found = head(normed.flatten(0, 1)).unflatten(0, (-1, self.slots))
        if most := self.config.candidates:  # the others are never drafted
            best = found.topk(most, -1)
            found = torch.full_like(found, NEVER).scatter(-1, best.indices, best.values)
        return normed, found


class TorchParallel(BlockNetwork):
    """Blocks. Logits come to the host, slot by slot, where rules decide."""

    kv: Slab

    def __init__(self, target: Model, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        assert isinstance(config, ParallelConfig)
        self._shared = Shared(target, checkpoint)
        super().__init__(self._shared.ids, config)
        self._network = self._shared.filled(ParallelNetwork(config), checkpoint)
        shape = config.decoder
        self.kv = Slab((2 * shape.layers, shape.kv_heads, shape.head_dim), self._shared)
        self._device_ids = torch.from_numpy(self.ids.astype(np.int64)).to(self._shared.device)

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        counts = [len(at) for at in positions]
        with torch.no_grad():
            states = torch.cat([self._shared.tensor(each) for each in hidden_states])
            starts = self.kv.lengthen(rows, counts)
            position, slots, at = uploaded(
                self._shared.device,
                np.concatenate(positions),
                np.repeat(self.kv.slots(rows), counts),
                spans(starts, counts),
            )
            layers = self._network.context(states, position)
            self.kv.write(slots, at, torch.stack([each for pair in layers for each in pair], 1))

    @torch.no_grad()
    def draft(self, asks: Sequence[Ask]) -> Drafts:
        network = self._network
        where = zip(*((ask.row, ask.pending, ask.position) for ask in asks), strict=True)
        anchor, *blocks = self._blocks(*where)
        normed, base = network.logits(anchor, *blocks)
        left = network.nothing(anchor)[:, None]

        def logits(level: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor | None]:
            nonlocal left
            tokens = tokens if level else anchor[:, None]
            if level:
                left = left.gather(1, parents[..., None].expand(-1, -1, left.shape[-1]))
            states = normed[:, level, None].expand(-1, tokens.shape[1], -1)
            bias, chance, left = network.after(tokens, states, left)
            slot = base[:, level, None]
            return slot if bias is None else slot + bias, chance

        return grown(asks, self._device_ids, logits)

    def _blocks(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> tuple[Any, ...]:
        """What ``ParallelNetwork.logits`` takes."""
        layers = [self.kv.row(row).unflatten(1, (-1, 2)).unbind(1) for row in rows]
        contexts = [[(each[:, 0], each[:, 1]) for each in row] for row in layers]
        return *uploaded(self._shared.device, anchors, positions), contexts, self._shared.embed, self._shared.logits

    @torch.no_grad()
    def block(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> tuple[F32, F32]:
        states, logits = self._network.logits(*self._blocks(rows, anchors, positions))
        return states.float().cpu().numpy(), logits.float().cpu().numpy()

    @torch.no_grad()
    def bias(self, tokens: Sequence[int], states: F32, left: F32) -> tuple[F32 | float, F32]:
        device, tensor = self._shared.device, self._shared.tensor
        bias, _, leaves = self._network.after(torch.tensor(tokens, device=device), tensor(states), tensor(left))
        return 0.0 if bias is None else bias.float().cpu().numpy(), leaves.float().cpu().numpy()
