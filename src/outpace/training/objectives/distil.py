"""A small decoder that learns the target's distribution (DistillSpec, arXiv 2310.08461)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.learned.configs import Decoder
from outpace.errors import Argument, ParameterError
from outpace.training.chunks import in_chunks, sequence_weights
from outpace.training.losses import acceptance, loss_named
from outpace.training.networks.student import Student
from outpace.training.objective import Simulated, TrainBatch
from outpace.training.simulate import walk
from outpace.training.target import TargetParts
from outpace.training.vocabulary import DraftVocabulary

_ROWS = 128  # positions whose logits are held at a time


class Teacher(Protocol):
    """The target itself, for sequences that nobody computed before."""

    def states(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Of tokens int64 [L]: the states before the final norm [L, h], one of each sequence."""


@dataclass(frozen=True, slots=True)
class DistilOptions:
    """``loss``: a name of losses.LOSSES: kl (forward), reverse, tv (1 - acceptance: wants a warm start), hybrid, ...

    ``on_policy``: the share of sequences that go on with ``on_policy_tokens`` words of the student's own from a place
    drawn at random; the target says what it thinks of them. ``depth``: tokens of a simulated chain.
    """

    loss: str = "kl"
    on_policy: float = 0.0
    on_policy_tokens: int = 32
    depth: int = 4

    def check(self) -> None:
        """Raises ParameterError."""
        loss_named(self.loss)
        if not 0 <= self.on_policy <= 1:
            raise ParameterError(Argument("on_policy", self.on_policy), " is no share: give 0 to 1")
        for name in ("on_policy_tokens", "depth"):
            if not 1 <= getattr(self, name) <= 1024:
                raise ParameterError(Argument(name, getattr(self, name)), " is out of range: give 1 to 1024")


class DistilObjective:
    """See ``Objective``. ``vocabulary``: the loss looks at these tokens alone, with both distributions renormalised
    (None: at all). ``teacher``: needed for words of the student's own."""

    def __init__(
        self,
        network: Student,
        target: TargetParts,
        options: DistilOptions,
        vocabulary: DraftVocabulary | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        options.check()
        if options.on_policy and teacher is None:
            raise ValueError("on-policy distillation needs a teacher")
        self.network, self.target, self.options, self.teacher = network, target, options, teacher
        device = target.head.device
        self.ids = None if vocabulary is None else torch.from_numpy(vocabulary.ids).to(device)
        self._inside = torch.ones(target.vocab, dtype=torch.bool, device=device)
        if vocabulary is not None:
            self._inside = torch.from_numpy(vocabulary.t2d).to(device)
        self._rows = target.head if self.ids is None else target.head[self.ids].contiguous()

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        student, name = self.network, self.options.loss
        if self.options.on_policy:
            batch = self.mixed(batch)
        following = torch.cat([batch.tokens[1:], batch.tokens[:1]])
        at = torch.nonzero(batch.loss_mask & self._inside[following]).flatten()
        if not len(at):
            return torch.zeros((), device=batch.device), {}
        weight = sequence_weights(torch.ones(len(at), device=at.device), batch.sequence[at], batch.sequences)
        normed = student(batch.tokens, batch.position, batch.starts)[at]
        heard = self.target.norm(batch.states[at, -1])
        rows = student.lm_head if self.ids is None else student.lm_head[self.ids]
        measure = loss_named(name)[0]

        def piece(start: int, stop: int, normed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            logits = normed @ rows.T
            with torch.no_grad():
                p = torch.softmax(heard[start:stop] @ self._rows.T, -1)
            missed = measure(logits, p)
            agree = (logits.argmax(-1) == p.argmax(-1)).to(missed.dtype)
            return (weight[start:stop] * missed).sum(), torch.stack((missed, agree), -1).detach()

        total, facts = in_chunks(piece, _ROWS, (normed,), (rows,))
        missed, agree = facts.mean(0).tolist()
        return total, {name: missed, "agree0": agree}

    @torch.no_grad()
    def simulate(self, batch: TrainBatch, depth: int | None = None) -> Simulated:
        """One forward says it for all starts: up to its first wrong token, a chain's prefix is the answer's own."""
        normed = self.network(batch.tokens, batch.position, batch.starts)
        best = torch.cat([(part @ self.network.lm_head.T).argmax(-1) for part in normed.split(_ROWS)])
        hits = best[:-1] == batch.tokens[1:]  # after position i, token i + 1
        reach, tried = self._reach(batch)
        right = tried & hits[reach.clamp_max(len(batch) - 2)]
        return walk(batch, right[:, :depth].cpu().numpy(), tried[:, :depth].cpu().numpy())

    @torch.no_grad()
    def overlaps(self, batch: TrainBatch) -> np.ndarray:
        normed = self.network(batch.tokens, batch.position, batch.starts)
        each = torch.cat([
            acceptance(part @ self.network.lm_head.T, self.target.probabilities(states))
            for part, states in zip(normed.split(_ROWS), batch.states[:, -1].split(_ROWS), strict=True)
        ])  # fmt: skip
        reach, tried = self._reach(batch)
        found: np.ndarray = (each[reach.clamp_max(len(batch) - 1)] * tried).double().cpu().numpy()
        return found

    def _reach(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """[N, k]: the position after which the chain of entry i says token s, which begins after i + 1; whether the
        answer goes on there."""
        every = torch.arange(len(batch), device=batch.device)
        reach = every[:, None] + 1 + torch.arange(self.options.depth, device=batch.device)
        return reach, reach + 1 < batch.ends[:, None]

    def export(self) -> tuple[str, Decoder, Mapping[str, Any]]:
        """Tensors by Hugging Face's names; a tied head is left out."""
        student = self.network
        tensors = {
            f"model.{name}": value.detach().cpu().numpy()
            for name, value in student.state_dict().items()
            if name not in ("embed_tokens", "lm_head")
        }
        tensors["model.embed_tokens.weight"] = student.embed_tokens.detach().cpu().numpy()
        if not student.tied:
            tensors["lm_head.weight"] = student.lm_head.detach().cpu().numpy()
        return "distil", student.shape, tensors

    def mixed(self, batch: TrainBatch) -> TrainBatch:
        """The batch with a share of its sequences in the student's words, of which these alone count. No states."""
        assert self.teacher is not None
        draw = torch.Generator().manual_seed(batch.seed)
        sequences, cuts = [], dict[int, int]()
        for b, (start, stop) in enumerate(pairwise(batch.starts)):
            own = batch.tokens[start:stop]
            places = torch.nonzero(batch.loss_mask[start:stop]).flatten()
            if len(places) and float(torch.rand((), generator=draw)) < self.options.on_policy:
                cut = int(places[int(torch.randint(len(places), (), generator=draw))]) + 1
                own = self.network.continued(own[:cut], self.options.on_policy_tokens, draw)
                cuts[b] = cut
            sequences.append(own)
        if not cuts:
            return batch
        heard = dict(zip(cuts, self.teacher.states([sequences[b] for b in cuts]), strict=True))
        states, masks, starts = [], [], [0]
        for b, own in enumerate(sequences):
            its = slice(batch.starts[b], batch.starts[b + 1])
            starts.append(starts[-1] + len(own))
            if b not in cuts:
                states.append(batch.states[its, -1:])
                masks.append(batch.loss_mask[its])
                continue
            states.append(heard[b][:, None].to(batch.states))
            masks.append(torch.arange(len(own), device=own.device) >= cuts[b] - 1)
            masks[-1][-1] = False
        return TrainBatch(
            tokens=torch.cat(sequences),
            starts=tuple(starts),
            position=torch.cat([torch.arange(len(own), device=own.device) for own in sequences]),
            loss_mask=torch.cat(masks),
            states=torch.cat(states),
            seed=batch.seed,
        )
