"""DSpark's objective: blocks at anchors drawn from every sequence (arXiv 2607.05147)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from outpace.drafters.learned.config import ParallelConfig
from outpace.drafters.learned.networks.parallel import BlockDraft, ParallelNetwork
from outpace.errors import Argument, ParameterError
from outpace.training.hidden_states import default_layers
from outpace.training.objective import HeadObjective, Packing, Simulated, TrainBatch, walk
from outpace.training.objectives import losses
from outpace.training.objectives.losses import in_chunks, sequence_weights
from outpace.training.options import ParallelOptions
from outpace.training.setup import Setup, shaped_as

_COST = 0.1  # of a plain step: what verifying a token more is taken to cost where the confidence cuts drafts
_ANCHORS = 32  # blocks whose logits are held at a time
_TOGETHER = 512  # blocks that are drafted at a time


class ParallelObjective(HeadObjective[ParallelNetwork, ParallelOptions]):
    """See ``Objective``."""

    @classmethod
    def layers(cls, options: ParallelOptions, count: int) -> tuple[int, ...]:
        return default_layers(count)

    @classmethod
    def begin(cls, setup: Setup, options: ParallelOptions) -> ParallelObjective:
        """Raises ParameterError."""
        vocab, mask = setup.parts.vocab, options.mask_token
        mask = int(np.argmin(setup.counts)) if mask is None else mask
        if not 0 <= mask < vocab:
            raise ParameterError(Argument("mask_token", mask), f" is out of range: give 0 to {vocab - 1}")
        config = ParallelConfig(
            shaped_as(setup.weights, options.layers, qk_norm=True), vocab, len(setup.vocabulary),
            setup.hidden_layers, options.block, mask, options.rank, confidence=True,
        )  # fmt: skip
        network = ParallelNetwork(config, setup.run.options.seed).to(setup.device)
        return cls(network, setup.parts.to(setup.device), setup.vocabulary, options, setup.counts)

    def finish(self, out: Path, train: Packing, held_out: Packing) -> dict[str, float]:
        """What the network is worth on held-out answers where its confidence cuts drafts, and the mean of tokens that
        are drafted then."""
        pieces = [self.simulate_prefixes(batch, _COST) for batch in held_out.batches()]
        found = [simulated for simulated, _, _ in pieces]
        drafted, starts = sum(tokens for _, tokens, _ in pieces), sum(starts for _, _, starts in pieces)
        total = sum(found[1:], found[0])
        return {"cut_tokens_per_step": total.tokens_per_step, "cut_drafted": drafted / max(starts, 1)}

    def anchors(self, batch: TrainBatch) -> Tensor:
        """Where blocks begin: packed indices int64 [A], ascending, drawn anew for every batch's seed."""
        draw = torch.Generator().manual_seed(batch.seed)
        order = torch.rand(len(batch), generator=draw).to(batch.device).masked_fill(~batch.loss_mask, math.inf)
        chosen = []
        for start, stop in pairwise(batch.starts):
            count = math.ceil(self.options.anchors * int(batch.loss_mask[start:stop].sum()))
            chosen.append(start + order[start:stop].argsort()[:count].sort().values)
        return torch.cat(chosen)

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        network, options, slots = self.network, self.options, self.network.slots
        at = self.anchors(batch)
        if not len(at):
            return torch.zeros((), device=batch.device), {}
        normed = self._normed(batch, at)
        index, there = self._slots(batch, at)
        following = batch.tokens[(index + 1).clamp_max(len(batch) - 1)]
        counts = there & batch.loss_mask[index] & (self.draft_head.place[following] >= 0)
        raw = torch.exp(-torch.arange(slots, device=batch.device) / options.slope) * counts * batch.weight[index]
        weight = sequence_weights(raw.flatten(), batch.sequence[at].repeat_interleave(slots), batch.sequences).view_as(
            raw
        )
        before = network.before(batch.tokens[index])
        with torch.no_grad():
            target_states = self.target.norm(batch.states[:, -1])
        drawn = self.draft_head.draw(batch.tokens, torch.Generator().manual_seed(batch.seed))
        head, offset = drawn.head, drawn.offset

        def piece(start: int, stop: int, normed: Tensor, *markov: Tensor) -> tuple[Tensor, Tensor]:
            logits = normed @ head.T
            if markov:
                logits = logits + markov[0] @ markov[1].T
            with torch.no_grad():
                wanted = target_states[index[start:stop]] @ head.T
                p = torch.softmax(wanted if offset is None else wanted.add_(offset), -1)
            if offset is not None:
                logits = logits + offset
            w = weight[start:stop]
            cross, apart = losses.soft_cross_entropy(logits, p), losses.total_variation(logits, p)
            total = (w * (options.cross_entropy * cross + 2 * options.l1 * apart)).sum()
            if options.length:
                inside = counts[start:stop]
                share = losses.expected_length((1 - apart) * inside) / inside.sum(-1).clamp_min(1)
                total = total + options.length * (w.sum(-1) * (1 - share)).sum()
            agree = logits.argmax(-1) == p.argmax(-1)
            return total, torch.stack((cross, 1 - apart, agree.to(cross.dtype)), -1).detach()

        markov_head = network.markov_head
        if before is None or markov_head is None:
            total, facts = in_chunks(piece, _ANCHORS, (normed,))
        else:
            rows = markov_head.markov_w2.weight
            rows = rows if drawn.chosen is None else rows[drawn.chosen]
            total, facts = in_chunks(piece, _ANCHORS, (normed, before), (rows,))
        figures = _figures(facts, counts)
        sure = network.confidence(normed, before)
        if sure is not None:
            goal = facts[..., 2 if options.confidence_of == "agreement" else 1]
            missed = F.binary_cross_entropy_with_logits(sure, goal, reduction="none")
            total = total + options.confidence * (weight * missed).sum()
            figures["confidence"] = float((missed.detach() * counts).sum() / counts.sum().clamp_min(1))
        return total, figures

    def simulate(self, batch: TrainBatch) -> Simulated:
        right, tried, _ = self._tried(batch)
        return walk(batch, right, tried)

    def simulate_prefixes(self, batch: TrainBatch, cost: float) -> tuple[Simulated, int, int]:
        """As ``simulate``, with the prefix that the confidence makes worth verifying where a token more in a draft
        takes ``cost`` of a plain step; and how many tokens are drafted in all, at how many starts."""
        right, tried, confidence = self._tried(batch)
        cut = best_prefix(confidence, cost)
        sent = np.arange(right.shape[1])[None, :] < cut[:, None]
        return walk(batch, right & sent, tried & sent), int((sent & tried).sum()), int(tried[:, 0].sum())

    @torch.no_grad()
    def _tried(self, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the block drafted after each entry, [N, K]: whether a slot is right, whether the answer has it, and the
        confidence in it. Entry i has token i + 1 as its anchor."""
        slots = self.network.slots
        right, tried = np.zeros((len(batch), slots), bool), np.zeros((len(batch), slots), bool)
        confidence = np.zeros((len(batch), slots), np.float32)
        for at in self._starts(batch):
            index, there = self._slots(batch, at)
            draft = self._draft(batch, at)
            following = batch.tokens[(index + 1).clamp_max(len(batch) - 1)]
            entry = at.cpu().numpy() - 1
            right[entry] = (there & (draft.tokens == following)).cpu().numpy()
            tried[entry] = there.cpu().numpy()
            confidence[entry] = draft.confidence.cpu().numpy()
        return right, tried, confidence

    def _starts(self, batch: TrainBatch) -> Iterable[Tensor]:
        """Anchors that serving may have, some at a time: those whose own token is the answer's, and not the first."""
        counts = batch.loss_mask.clone()
        counts[1:] &= batch.loss_mask[:-1]
        counts[list(batch.starts[:-1])] = False
        starts: Iterable[Tensor] = torch.nonzero(counts).flatten().split(_TOGETHER)
        return starts

    def _draft(self, batch: TrainBatch, at: Tensor) -> BlockDraft:
        normed = self._normed(batch, at)
        draft: BlockDraft = self.network.decide(
            batch.tokens[at], normed, normed @ self.draft_head.head.T, self.draft_head.ids
        )
        return draft

    def _normed(self, batch: TrainBatch, at: Tensor) -> Tensor:
        """Normed states [A, K, h] of blocks at packed indices ``at`` int64 [A], ascending."""
        bounds = torch.searchsorted(at, torch.tensor(batch.starts, device=at.device)).tolist()
        needed = [(start, at[a:b]) for (a, b), start in zip(pairwise(bounds), batch.starts, strict=False) if a < b]
        # Nothing beyond a sequence's last anchor is seen.
        reach = [torch.arange(start, int(anchors[-1]), device=at.device) for start, anchors in needed]
        every = torch.cat(reach)
        context = self.network.context(batch.states[every, :-1].float(), batch.position[every])
        sizes = [len(span) for span in reach]
        parts = zip(*(zip(k.split(sizes), v.split(sizes), strict=True) for k, v in context), strict=True)
        tokens = self.network.inputs(batch.tokens[at])
        embedded = self.target.embed(tokens.flatten()).view(*tokens.shape, -1)
        seen = [anchors - start for start, anchors in needed]
        return self.network.blocks(embedded, batch.position[at], [list(part) for part in parts], seen)

    def _slots(self, batch: TrainBatch, at: Tensor) -> tuple[Tensor, Tensor]:
        """Where the tokens before those that slots say stand: packed indices [A, K]; whether the sequence goes on."""
        last = batch.ends[at][:, None] - 1
        index = at[:, None] + torch.arange(self.network.slots, device=at.device)
        return torch.minimum(index, last), index < last


def best_prefix(confidence: npt.NDArray[np.floating], cost: float) -> npt.NDArray[np.int64]:
    """How much of each draft to verify: int64 [n], of ``confidence`` [n, K], each given that those before are accepted.

    The length that has most expected tokens a second, where each token of the draft makes a step ``cost`` of a plain
    one's time longer; the shorter one on ties.
    """
    path = np.cumprod(np.asarray(confidence, np.float64), 1)
    tokens = 1 + np.concatenate((np.zeros((len(path), 1)), np.cumsum(path, 1)), 1)
    seconds = 1 + cost * np.arange(tokens.shape[1])
    best: npt.NDArray[np.int64] = (tokens / seconds).argmax(1)
    return best


def _figures(facts: Tensor, counts: Tensor) -> dict[str, float]:
    """Means over slots that count, of cross-entropy, and by slot of acceptance and agreement."""
    found = {"cross_entropy": float((facts[..., 0] * counts).sum() / counts.sum().clamp_min(1))}
    by_slot = ((facts * counts[..., None]).sum(0) / counts.sum(0).clamp_min(1)[:, None]).tolist()
    for k, (_, accept, agree) in enumerate(by_slot):
        found[f"accept{k}"], found[f"agree{k}"] = accept, agree
    return found
