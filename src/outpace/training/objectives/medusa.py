"""Medusa-1's objective (arXiv 2401.10774), and what its heads' measured accuracy says about trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path as Folder

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.drafters.learned import checkpoint
from outpace.drafters.learned.config import MedusaConfig
from outpace.drafters.learned.medusa import Path, accepted, gains_of_ranks, search
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.training.objective import HeadObjective, Packing, Simulated, TrainBatch, walk
from outpace.training.objectives import losses
from outpace.training.objectives.losses import in_chunks, sequence_weights
from outpace.training.options import MedusaOptions
from outpace.training.setup import Setup

_MEASURED = 40_000  # tokens of training answers that the tree is searched on
_ROWS = 128  # positions whose logits are held at a time
NEVER = 1 << 30  # the rank of what is no candidate


class MedusaObjective(HeadObjective[MedusaNetwork, MedusaOptions]):
    """See ``Objective``. Chains are simulated; ``find_tree`` searches a tree."""

    @classmethod
    def begin(cls, setup: Setup, options: MedusaOptions) -> MedusaObjective:
        parts = setup.parts.to(setup.device)
        size = len(setup.vocabulary)
        network = MedusaNetwork(MedusaConfig(parts.hidden, parts.vocab, size, options.heads, options.layers))
        return cls(network.to(setup.device), parts, setup.vocabulary, options, setup.counts)

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        heads = self.network.config.heads
        index, wanted = self._wanted(batch)
        counts = (wanted >= 0) & batch.loss_mask[index]
        raw = self.options.decay ** torch.arange(heads, device=batch.device) * counts * batch.weight[index]
        owner = batch.sequence.repeat_interleave(heads)
        weight = sequence_weights(raw.flatten(), owner, batch.sequences).view_as(raw)
        normed = self.target.norm(batch.states[:, -1])
        drawn = self.draft_head.draw(batch.tokens, torch.Generator().manual_seed(batch.seed))
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

    def simulate(self, batch: TrainBatch) -> Simulated:
        ranks = self.ranks(batch)
        return walk(batch, (ranks == 0), self._tried(batch))

    def simulate_tree(self, batch: TrainBatch, tree: tuple[Path, ...]) -> Simulated:
        """As ``simulate``, with a tree. Its steps count as a chain's of the depth that is accepted."""
        reached = accepted(self.ranks(batch), tree)
        right = np.arange(self.network.config.heads)[None, :] < reached[:, None]
        return walk(batch, right, self._tried(batch))

    def find_tree(self, batches: Iterable[TrainBatch]) -> tuple[Path, ...]:
        """The tree that gains most tokens on ``batches``."""
        ranks = [self.ranks(batch)[batch.loss_mask.cpu().numpy()] for batch in batches]
        gain = gains_of_ranks(np.concatenate(ranks))
        return search(gain, self.options.nodes, self.network.config.heads, self.options.ranks)

    def finish(self, out: Folder, train: Packing, held_out: Packing) -> dict[str, float]:
        """Search the best checkpoint's tree on answers that it was trained on, and write it again with the tree.

        What the tree is worth is measured on held-out answers, so not on those that it was chosen by.
        """
        best = checkpoint.read(out)
        self.network.load_state_dict({name: torch.from_numpy(best.tensors[name]) for name in self.network.state_dict()})
        members, tokens = list[int](), 0
        for group in train.cut(range(len(train.answers))):
            members += group
            tokens += int(train.answers.lengths()[group].sum())
            if tokens >= _MEASURED:
                break
        tree = self.find_tree(train.batches(members))
        method, config, tensors = self.export()
        checkpoint.write(out, method, replace(config, tree=tree), tensors, best.target, best.recipe)
        found = [self.simulate_tree(batch, tree) for batch in held_out.batches()]
        return {"tree_tokens_per_step": sum(found[1:], found[0]).tokens_per_step}

    @torch.no_grad()
    def ranks(self, batch: TrainBatch) -> npt.NDArray[np.int64]:
        """The rank that each head gives, after each position, to the token that the answer has there: int64 [N, K].

        ``NEVER`` beyond the options' ranks, for tokens outside the draft vocabulary, and beyond the answer's end.
        """
        _, wanted = self._wanted(batch)
        found = []
        for part in torch.arange(len(batch), device=batch.device).split(_ROWS):
            logits = self.network(self.target.norm(batch.states[part, -1])) @ self.draft_head.head.T
            own = wanted[part][..., None]
            own_logits = logits.gather(-1, own.clamp_min(0))
            lower = torch.arange(logits.shape[-1], device=batch.device) < own
            rank = ((logits > own_logits) | ((logits == own_logits) & lower)).sum(-1)
            found.append(rank.masked_fill((wanted[part] < 0) | (rank >= self.options.ranks), NEVER))
        ranks: npt.NDArray[np.int64] = torch.cat(found).cpu().numpy()
        return ranks

    def _wanted(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """For heads [N, K]: the position after which the target says what a head is to say, as a packed index, and the
        draft id of what the answer has there; -1 beyond its end and outside of the draft vocabulary."""
        last = batch.ends[:, None] - 1
        index = self._ahead(batch, 1)
        there = index < last
        index = torch.minimum(index, last)
        following = batch.tokens[(index + 1).clamp_max(len(batch) - 1)]
        return index, self.draft_head.place[following].masked_fill(~there, -1)

    def _tried(self, batch: TrainBatch) -> npt.NDArray[np.bool_]:
        tried: npt.NDArray[np.bool_] = (self._ahead(batch, 2) < batch.ends[:, None]).cpu().numpy()
        return tried

    def _ahead(self, batch: TrainBatch, first: int) -> Tensor:
        """int64 [N, K]: for each position, those of the heads' tokens, ``first`` after it for the first head."""
        every = torch.arange(len(batch), device=batch.device)
        return every[:, None] + first + torch.arange(self.network.config.heads, device=batch.device)
