"""Medusa-1's objective (arXiv 2401.10774), and what its heads' measured accuracy says about"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.drafters.learned.configs import MedusaConfig
from outpace.drafters.learned.medusa import Path, accepted, gains_of_ranks, search
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.errors import Argument, ParameterError
from outpace.training import losses
from outpace.training.chunks import in_chunks, sequence_weights
from outpace.training.draft_head import DraftHead
from outpace.training.objective import Simulated, TrainBatch
from outpace.training.simulate import walk
from outpace.training.target import TargetParts
from outpace.training.vocabulary import DraftVocabulary

_ROWS = 128  # positions whose logits are held at a time
NEVER = 1 << 30  # the rank of what is no candidate


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Head k weighs ``decay``^k. ``candidates``: rows of the head a batch is trained against (0: all). ``nodes``: of
    the tree that is searched; ``ranks``: candidates of each head there.
    """

    decay: float = 0.8
    candidates: int = 2048
    nodes: int = 32
    ranks: int = 10

    def check(self) -> None:
        """Raises ParameterError."""
        if not 0 < self.decay <= 1:
            raise ParameterError(Argument("decay", self.decay), " is out of range: give more than 0, at most 1")
        if self.candidates < 0:
            raise ParameterError(Argument("candidates", self.candidates), " is out of range: give 0 for all, or more")
        for name in ("nodes", "ranks"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ParameterError(Argument(name, getattr(self, name)), " is out of range: give 1 to 1024")


class MedusaObjective:
    """See ``Objective``. ``target``: head and norm, frozen. Chains are simulated; ``plant`` finds a tree."""

    def __init__(
        self,
        network: MedusaNetwork,
        target: TargetParts,
        vocabulary: DraftVocabulary,
        options: MedusaOptions,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """``counts`` int64 [V]: how often tokens are said; the likeliest ones are candidates then."""
        options.check()
        self.network, self.target, self.options = network, target, options
        self.words = DraftHead(target, vocabulary, counts, options.candidates)
        self.tree = network.config.tree

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        heads = self.network.config.heads
        index, said = self._said(batch)
        counts = (said >= 0) & batch.loss_mask[index]
        raw = self.options.decay ** torch.arange(heads, device=batch.device) * counts
        owner = batch.sequence.repeat_interleave(heads)
        weight = sequence_weights(raw.flatten(), owner, batch.sequences).view_as(raw)
        normed = self.target.norm(batch.states[:, -1])
        drawn = self.words.draw(batch.tokens, torch.Generator().manual_seed(batch.seed))
        head, offset = drawn.head, drawn.offset

        def piece(start: int, stop: int, states: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():  # what heads listen to overlaps: one product for all
                wanted = normed[start : start + len(states) + heads] @ head.T
                p = torch.softmax(wanted if offset is None else wanted.add_(offset), -1)
                best = p.argmax(-1)
            total, facts = states.new_zeros(()), []
            for k in range(heads):
                logits, of = states[:, k] @ head.T, index[start:stop, k] - start
                logits = logits if offset is None else logits + offset
                cross = losses.soft_cross_entropy(logits, p[of])
                total = total + (weight[start:stop, k] * cross).sum()
                facts.append(torch.stack((cross, (logits.argmax(-1) == best[of]).to(cross.dtype)), -1).detach())
            return total, torch.stack(facts, 1)

        total, facts = in_chunks(piece, _ROWS, (self.network(normed),))
        cross = (facts[..., 0] * counts).sum() / counts.sum().clamp_min(1)
        agree = (facts[..., 1] * counts).sum(0) / counts.sum(0).clamp_min(1)
        return total, {"cross_entropy": float(cross)} | {f"agree{k}": float(a) for k, a in enumerate(agree)}

    def simulate(self, batch: TrainBatch, depth: int | None = None) -> Simulated:
        ranks = self.ranks(batch)
        return walk(batch, (ranks == 0)[:, :depth], self._tried(batch)[:, :depth])

    @torch.no_grad()
    def overlaps(self, batch: TrainBatch) -> np.ndarray:
        index, _ = self._said(batch)
        p = self.target.probabilities(batch.states[:, -1], self.words.ids)
        states = self.network(self.target.norm(batch.states[:, -1]))
        heads = [losses.head_acceptance(states[:, k], self.words.head, None, p[its]) for k, its in enumerate(index.T)]
        overlaps: np.ndarray = torch.stack(heads, 1).double().cpu().numpy() * self._tried(batch)
        return overlaps

    def simulate_tree(self, batch: TrainBatch, tree: tuple[Path, ...]) -> Simulated:
        """As ``simulate``, with a tree. Its steps count as a chain's of the depth that is accepted."""
        reached = accepted(self.ranks(batch), tree)
        right = np.arange(self.network.config.heads)[None, :] < reached[:, None]
        return walk(batch, right, self._tried(batch))

    def plant(self, batches: Iterable[TrainBatch]) -> tuple[Path, ...]:
        """Search the tree that is best on ``batches``, and keep it for ``export``."""
        ranks = [self.ranks(batch)[batch.loss_mask.cpu().numpy()] for batch in batches]
        gain = gains_of_ranks(np.concatenate(ranks))
        self.tree = search(gain, self.options.nodes, self.network.config.heads, self.options.ranks)
        return self.tree

    @torch.no_grad()
    def ranks(self, batch: TrainBatch) -> npt.NDArray[np.int64]:
        """The rank that each head gives, after each position, to the token that the answer has there: int64 [N, K].

        ``NEVER`` beyond the options' ranks, for tokens outside the draft vocabulary, and beyond the answer's end.
        """
        _, said = self._said(batch)
        found = []
        for part in torch.arange(len(batch), device=batch.device).split(_ROWS):
            logits = self.network(self.target.norm(batch.states[part, -1])) @ self.words.head.T
            own = said[part][..., None]
            mine = logits.gather(-1, own.clamp_min(0))
            lower = torch.arange(logits.shape[-1], device=batch.device) < own
            rank = ((logits > mine) | ((logits == mine) & lower)).sum(-1)
            found.append(rank.masked_fill((said[part] < 0) | (rank >= self.options.ranks), NEVER))
        ranks: npt.NDArray[np.int64] = torch.cat(found).cpu().numpy()
        return ranks

    def export(self) -> tuple[str, MedusaConfig, Mapping[str, Any]]:
        config = replace(self.network.config, tree=self.tree)
        return "medusa", config, self.words.tensors(self.network)

    def _said(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """For heads [N, K]: the position after which the target says what a head is to say, as a packed index, and the
        draft id of what the answer has there; -1 beyond its end and outside of the draft vocabulary."""
        last = batch.ends[:, None] - 1
        index = self._ahead(batch, 1)
        there = index < last
        index = torch.minimum(index, last)
        following = batch.tokens[(index + 1).clamp_max(len(batch) - 1)]
        return index, self.words.place[following].masked_fill(~there, -1)

    def _tried(self, batch: TrainBatch) -> npt.NDArray[np.bool_]:
        tried: npt.NDArray[np.bool_] = (self._ahead(batch, 2) < batch.ends[:, None]).cpu().numpy()
        return tried

    def _ahead(self, batch: TrainBatch, first: int) -> Tensor:
        """int64 [N, K]: for each position, those of the heads' tokens, ``first`` after it for the first head."""
        every = torch.arange(len(batch), device=batch.device)
        return every[:, None] + first + torch.arange(self.network.config.heads, device=batch.device)
