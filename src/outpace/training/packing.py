"""Which answers are trained on when: an epoch's order, cut into batches of about as many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outpace.errors import ParameterError
from outpace.training.data import Answers
from outpace.training.devices import CPU
from outpace.training.objective import TrainBatch


class States(Protocol):
    """Where the target's hidden states come from: ``hidden_states.HiddenStateSource``."""

    def plan(self, order: Sequence[int]) -> None:
        """What will be asked for next, in order."""

    def states(self, i: int) -> Tensor:
        """[L, T + 1, h] of answer i."""

    def close(self) -> None: ...


class Packing:
    """Batches on ``device`` of at most ``budget`` tokens of ``answers``, each answer cut at ``longest``.

    A prompt's positions weigh ``prompt_weight`` in the loss, those of a tail that repeats itself ``loop_weight``, an
    answer's others 1. Order and seeds follow from ``seed`` and the epoch alone, so that training can go on anywhere.
    """

    def __init__(
        self,
        answers: Answers,
        states: States,
        budget: int,
        longest: int,
        prompt_weight: float,
        seed: int,
        device: torch.device = CPU,
        loop_weight: float = 1.0,
    ) -> None:
        if longest > budget:
            raise ParameterError(f"answers of up to {longest} tokens do not fit into batches of {budget}: cut them")
        self.answers, self._states = answers, states
        self.budget, self.longest, self.prompt_weight, self.seed = budget, longest, prompt_weight, seed
        self.loop_weight = loop_weight
        self._device = device
        self._lengths = np.minimum(answers.lengths(), longest)

    def epoch(self, epoch: int) -> list[list[int]]:
        """Every answer once, in batches."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.answers))
        return self.cut(order.tolist())

    def cut(self, order: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for i in order:
            length = int(self._lengths[i])
            if length > room:
                batches.append([])
                room = self.budget
            batches[-1].append(i)
            room -= length
        return batches

    def plan(self, batches: Sequence[Sequence[int]]) -> None:
        """Say what ``batch`` will be asked for, so that states can be computed ahead."""
        self._states.plan([i for batch in batches for i in batch])

    def batches(self, members: Sequence[int] | None = None) -> Iterator[TrainBatch]:
        """The answers ``members`` (None: all), batch by batch."""
        groups = self.cut(range(len(self.answers)) if members is None else members)
        self.plan(groups)
        return (self.batch(group) for group in groups)

    def batch(self, members: Sequence[int], seed: int = 0) -> TrainBatch:
        """The answers ``members``, with their states."""
        answers = [self.answers[i] for i in members]
        states = [self._states.states(i)[: self.longest] for i in members]
        first = [answer.prompt_length - 1 for answer in answers]
        tokens = [answer.tokens[: self.longest] for answer in answers]
        loops = None if self.loop_weight == 1 else [answer.loop_start() - 1 for answer in answers]
        packed = TrainBatch.pack(
            tokens, states, first, seed, self.prompt_weight, loops=loops, loop_weight=self.loop_weight
        )
        return packed.to(self._device)
