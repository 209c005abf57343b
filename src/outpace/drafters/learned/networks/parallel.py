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
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.layouts import ParallelConfig
from outpace.drafters.learned.networks.beside import Shared, Slab, spans
from outpace.drafters.learned.networks.layers import Attention, Layer, Norm, Rope, initialise
from outpace.drafters.learned.parallel import BlockNetwork
from outpace.drafters.learned.picks import chosen
from outpace.errors import NotFiniteError
from outpace.exact.drafts import Drafts
from outpace.models.base import Model
from outpace.models.torch.upload import uploaded

Context = list[tuple[Tensor, Tensor]]  # of each layer: keys and values [n, kv_heads, head_dim] of n positions
Pick = Callable[[Tensor, int], Tensor]


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
        last = slot if causal else torch.full_like(slot, slots - 1)  # that each slot sees, and where its window ends
        ends = seen[:, None] + (torch.full_like(slot, -1) if anchored else last)
        hidden = hidden | (at <= ends[..., None] - window)
        unseen = (slot > last[:, None]) | (not anchored) * (slot <= last[:, None] - window)
        near = near.masked_fill(unseen.repeat_interleave(heads // groups, 0), -torch.inf)
    far = far.masked_fill(hidden.repeat_interleave(heads // groups, 1), -torch.inf)
    scores = torch.cat((far, near), -1)
    far, near = scores.softmax(-1).split((length, slots), -1)
    out = (far.flatten(1, 2) @ context_v.transpose(0, 1)).view(groups, blocks, rows, d) + near @ v.permute(2, 0, 1, 3)
    return out.view(groups, blocks, slots, heads // groups, d).permute(1, 2, 0, 3, 4).reshape(blocks, slots, -1)


class MarkovHead(nn.Module):
    """What the token before adds to the logits: ``markov_w2(markov_w1(token))``."""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab, bias=False)


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
        x = embedded.flatten(0, 1)
        cos, sin = self.rope((position[:, None] + torch.arange(size, device=position.device)).flatten())
        counts = [len(limits) for limits in seen]
        for i, layer in enumerate(self.layers):
            attention: Attention = layer.self_attn
            normed = layer.input_layernorm(x)
            k, v = (part.unflatten(0, (-1, size)) for part in attention.keys_values(normed, cos, sin))
            q = attention.queries(normed, cos, sin).unflatten(0, (-1, size))
            parts = zip(q.split(counts), k.split(counts), v.split(counts), contexts, seen, strict=True)
            window, causal, anchored = self.config.decoder.window(i), self.config.causal, self.config.anchored
            found = [
                attend(a, b, c, *context[i], limits, window, causal, anchored) for a, b, c, context, limits in parts
            ]
            x = x + attention.o_proj(torch.cat(found).flatten(0, 1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = x.unflatten(0, (-1, size))
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
    def decide(
        self, anchor: Tensor, normed: Tensor, logits: Tensor, ids: Tensor, pick: Pick | None = None
    ) -> BlockDraft:
        """From normed states [B, K, h] to tokens, slot by slot.

        ``anchor`` int64 [B]; ``logits`` [B, K, D]: the head's, of ``ids`` int64 [D], the target's ids of the draft
        vocabulary, ascending. ``pick(logits [B, D], slot)`` gives indices int64 [B] into it (None: the likeliest, the
        lowest id on ties). Without a confidence head the drafter's own probability stands for it.
        """
        token, tokens, sure = anchor, [], []
        biased = logits if self.markov_head is None else logits.clone()
        for slot in range(self.slots):
            before, found = self.before(token), biased[:, slot]
            if before is not None and self.markov_head is not None:
                found += self.markov_head.markov_w2(before)
            index = found.argmax(-1) if pick is None else pick(found, slot)
            chance = self.confidence(normed[:, slot], before)
            if chance is None:
                sure.append(found.softmax(-1).gather(-1, index[:, None])[:, 0])
            else:
                sure.append(chance.sigmoid())
            token = ids[index]
            tokens.append(token)
        return BlockDraft(torch.stack(tokens, 1), torch.stack(sure, 1), biased)

    @torch.no_grad()
    def draft(
        self,
        anchor: Tensor,
        position: Tensor,
        contexts: Sequence[Context],
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        ids: Tensor,
        pick: Pick | None = None,
    ) -> BlockDraft:
        """A block for each of B rows, which sees all of its row's context: what serving calls.

        ``anchor``, ``position`` int64 [B]: the pending tokens and where they stand. ``embed``: tokens int64 [n] to what
        enters the target's first layer [n, h]; ``head``: normed states [n, h] to logits [n, D] of ``ids``.
        """
        normed, logits = self.logits(anchor, position, contexts, embed, head)
        draft: BlockDraft = self.decide(anchor, normed, logits, ids, pick)
        return draft

    @torch.no_grad()
    def logits(
        self,
        anchor: Tensor,
        position: Tensor,
        contexts: Sequence[Context],
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Normed states [B, K, h] and the head's logits [B, K, D] of such blocks."""
        tokens = self.inputs(anchor)
        embedded = embed(tokens.flatten()).view(*tokens.shape, -1)
        seen = [torch.tensor([len(context[0][0])], device=anchor.device) for context in contexts]
        normed = self.blocks(embedded, position, contexts, seen)
        return normed, head(normed.flatten(0, 1)).unflatten(0, (-1, self.slots))


class TorchParallel(BlockNetwork):
    """Blocks. Logits come to the host, slot by slot, where noise or rules decide."""

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

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        most = max(ask.levels for ask in asks)
        sampled: dict[tuple[int, int], float] = {}  # by row and slot: the chance of what noise has chosen

        def pick(logits: Tensor, slot: int) -> Tensor:
            best = logits.argmax(-1)
            for b, ask in enumerate(asks):
                if slot < ask.levels and ask.chooser is not None and not ask.chooser.params.greedy:
                    own = logits[b].float().cpu().numpy()
                    (best[b],), (gain,) = chosen(own, self.ids, ask.chooser, slot, 1)
                    sampled[b, slot] = float(np.exp(gain))
            return best

        with torch.no_grad():
            blocks = self._blocks(*zip(*((ask.row, ask.pending, ask.position) for ask in asks), strict=True))
            drafted = self._network.draft(*blocks, self._device_ids, pick)
        chances = drafted.confidence[:, :most].float().cpu().numpy()
        for at, chance in sampled.items():
            chances[at] = chance
        if not np.isfinite(chances).all():
            raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
        tokens = drafted.tokens[:, :most].to(torch.int32).cpu().numpy()
        confidence = np.cumprod(np.clip(chances, 0, 1), 1, dtype=np.float32)
        return Drafts(tokens, np.array([ask.levels for ask in asks], np.int32), confidence=confidence)

    def _blocks(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> tuple[Any, ...]:
        """What ``ParallelNetwork.logits`` takes."""
        layers = [self.kv.row(row).unflatten(1, (-1, 2)).unbind(1) for row in rows]
        contexts = [[(each[:, 0], each[:, 1]) for each in row] for row in layers]
        return *uploaded(self._shared.device, anchors, positions), contexts, self._shared.embed, self._shared.logits

    def block(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> F32:
        with torch.no_grad():
            found: F32 = self._network.logits(*self._blocks(rows, anchors, positions))[1].float().cpu().numpy()
            return found

    def bias(self, tokens: Sequence[int]) -> F32 | float:
        with torch.no_grad():
            before = self._network.before(torch.tensor(tokens, device=self._shared.device))
            if before is None or self._network.markov_head is None:
                return 0.0
            found: F32 = self._network.markov_head.markov_w2(before).float().cpu().numpy()
            return found
