"""The seam between the training loop and what is trained: a batch of packed sequences, an objective, its simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """B sequences, packed one after the other without padding: N tokens in all.

    ``tokens`` int64 [N]; ``starts`` bounds the sequences (B + 1 numbers); ``position`` int64 [N] within the sequence.
    ``weight`` float32 [N]: what the token *after* this position weighs in the loss, so an answer's positions are the
    prompt's last one to its own last but one; 0: nothing. ``states`` float32 or bfloat16 [N, T + 1, h]: hidden states,
    then the state before the final norm. ``seed``: of what is drawn for this batch, so that nothing depends on which
    process has it.
    """

    tokens: Tensor
    starts: tuple[int, ...]
    position: Tensor
    weight: Tensor
    states: Tensor
    seed: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss_mask(self) -> Tensor:
        """bool [N]: whether the token after this position counts."""
        return self.weight > 0

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1

    @property
    def sequence(self) -> Tensor:
        """int64 [N]: which sequence a token belongs to."""
        counts = torch.tensor([b - a for a, b in pairwise(self.starts)], device=self.device)
        return torch.repeat_interleave(torch.arange(self.sequences, device=self.device), counts)

    @property
    def ends(self) -> Tensor:
        """int64 [N]: where a token's sequence ends."""
        return torch.tensor(self.starts[1:], device=self.device)[self.sequence]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def to(self, device: torch.device) -> TrainBatch:
        """The batch on a device. To a card it is copied from pinned memory, while the host goes on."""
        if device == self.device:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return replace(
            self, tokens=moved(self.tokens), position=moved(self.position), weight=moved(self.weight),
            states=moved(self.states),
        )  # fmt: skip

    @staticmethod
    def pack(
        tokens: Sequence[np.ndarray],
        states: Sequence[Tensor],
        first: Sequence[int],
        seed: int = 0,
        before: float = 0.0,
        loops: Sequence[int] | None = None,
        loop_weight: float = 1.0,
    ) -> TrainBatch:
        """``tokens[b]`` int32 [n_b], ``states[b]`` [n_b, T + 1, h]; positions weigh 1 from ``first[b]`` on, ``before``
        in front of it, and ``loop_weight`` from ``loops[b]`` (None: the end) on."""
        starts = [0]
        weights = []
        for b, (sequence, begin) in enumerate(zip(tokens, first, strict=True)):
            starts.append(starts[-1] + len(sequence))
            weight = torch.full((len(sequence),), before)
            weight[max(begin, 0) :] = 1.0
            if loops is not None:
                weight[loops[b] :] = loop_weight
            weight[-1] = 0.0
            weights.append(weight)
        return TrainBatch(
            tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            starts=tuple(starts),
            position=torch.cat([torch.arange(len(sequence)) for sequence in tokens]),
            weight=torch.cat(weights),
            states=torch.cat(list(states)),
            seed=seed,
        )


@dataclass(slots=True)
class Simulated:
    """What drafting would have brought on recorded answers. Sums, so that batches add up."""

    steps: int  # target forwards of the walk through the answers
    tokens: int  # that they gained
    tried: np.ndarray  # int64 [k]: starts at which the draft's first i tokens were right
    right: np.ndarray  # int64 [k]: and token i, too

    def __add__(self, other: Simulated) -> Simulated:
        return Simulated(
            self.steps + other.steps, self.tokens + other.tokens, self.tried + other.tried, self.right + other.right
        )

    def sums(self) -> list[float]:
        """As numbers that add up; ``of`` is the way back."""
        return [self.steps, self.tokens, *self.tried.tolist(), *self.right.tolist()]

    @staticmethod
    def of(sums: Sequence[float]) -> Simulated:
        steps, tokens, *rest = (round(value) for value in sums)
        half = len(rest) // 2
        return Simulated(steps, tokens, np.array(rest[:half], np.int64), np.array(rest[half:], np.int64))

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(self.steps, 1)

    @property
    def acceptance(self) -> list[float]:
        """By position of the draft, given that everything before it was accepted; over all starts."""
        return [float(value) for value in self.right / np.maximum(self.tried, 1)]


# Folder; method, config and tensors as an objective exports them; the target's facts; the recipe.
Write = Callable[[Path, str, Any, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], None]


class Objective(Protocol):
    """A network and what it is trained for. ``write`` writes the checkpoint of what ``export`` gives."""

    network: nn.Module
    write: Write

    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        """A scalar, the mean over sequences of each one's mean; and figures to print."""

    def simulate(self, batch: TrainBatch, depth: int | None = None) -> Simulated:
        """On answers that the target gave greedily: what a chain would have brought, of at most ``depth`` tokens."""

    def overlaps(self, batch: TrainBatch) -> np.ndarray:
        """float64 [N, k]: sum min(p, q) at temperature 1, over all of the target's tokens, of the chain's token s after
        entry i where the answer's own words are before it; 0 where the answer has no such token."""

    def export(self) -> tuple[str, Any, Mapping[str, Any]]:
        """Method, config and tensors (numpy, canonical names) of a checkpoint."""
