"""The seam between the training loop and what is trained: batches of packed answers, an objective, its simulation.

A greedy answer is what the target says after each of its own prefixes, so a draft is right where it equals the answer;
and since nothing after a wrong token counts, feeding the answer's own tokens is the same as feeding the draft's: what a
chain would have brought is known without running the target again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from outpace.drafters.learned import checkpoint
from outpace.errors import Argument, ParameterError
from outpace.training.data import Answers
from outpace.training.options import EagleOptions, MedusaOptions, MtpOptions, Options, ParallelOptions
from outpace.training.target import DraftHead, DraftVocabulary, TargetParts

CPU = torch.device("cpu")
Flags = npt.NDArray[np.bool_]


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


class States(Protocol):
    """Where the target's hidden states come from: ``hidden_states.HiddenStateSource``."""

    def plan(self, order: Sequence[int]) -> None:
        """What will be asked for next, in order."""

    def states(self, i: int) -> Tensor:
        """[L, T + 1, h] of answer i."""

    def close(self) -> None: ...


class NoStates:
    """``States`` of a training that reads none."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def plan(self, order: Sequence[int]) -> None:
        """See ``States``."""

    def states(self, i: int) -> Tensor:
        """[L, 0, 0]."""
        return torch.empty(len(self._answers[i].tokens), 0, 0)

    def close(self) -> None:
        """See ``States``."""


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
            raise ParameterError(
                Argument("longest", longest), f" does not fit into batches of {budget} tokens: give no more, or raise ",
                Argument("tokens"),
            )  # fmt: skip
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


def walk(batch: TrainBatch, right: Flags, tried: Flags) -> Simulated:
    """``right`` bool [N, k]: whether the chain drafted after entry i has its token s right; ``tried``: it exists.

    A row begins with the prompt and one token, whose entry is the first in ``loss_mask``, and goes on by what was
    accepted and one more, as serving does.
    """
    depth = right.shape[1]
    accepted = np.logical_and.accumulate(right, 1).sum(1)
    steps = tokens = 0
    starting = np.zeros(len(batch), bool)
    for first, end in pairwise(batch.starts):
        begin = first + int(np.argmax(batch.loss_mask[first:end].cpu().numpy()))
        starting[begin : end - 2] = True
        at = begin
        while at + 2 < end:
            gained = min(int(accepted[at]) + 1, end - at - 2)
            steps, tokens, at = steps + 1, tokens + gained, at + gained
    before = np.arange(depth)[None, :] <= accepted[:, None]
    asked = before & tried & starting[:, None]
    return Simulated(steps, tokens, asked.sum(0), (asked & right).sum(0))


# Folder; method, config and tensors as an objective exports them; the target's facts; the recipe.
Write = Callable[[Path, str, Any, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], None]

NetworkT = TypeVar("NetworkT", bound=nn.Module)
OptionsT = TypeVar("OptionsT", bound=Options)
HeadOptionsT = TypeVar("HeadOptionsT", bound=EagleOptions | MtpOptions | MedusaOptions | ParallelOptions)


class Objective(ABC, Generic[NetworkT, OptionsT]):
    """A kind of drafter in training: a network, what it is trained for, how it begins, and what follows the training.

    Subclasses add ``begin(setup, options)``, which makes the objective with a network at its beginning.
    """

    network: NetworkT
    options: OptionsT
    write: Write = staticmethod(checkpoint.write)  # the checkpoint of what ``export`` gives

    @classmethod
    def layers(cls, options: OptionsT, count: int) -> tuple[int, ...] | None:
        """The layers, of ``count``, whose outputs the network reads, beside the last one's; None: not even that."""
        return ()

    @classmethod
    def vocabulary(cls, options: OptionsT) -> DraftVocabulary | None:
        """The draft vocabulary where the options give one; None: the most frequent tokens."""
        return None

    @abstractmethod
    def loss(self, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        """A scalar, the mean over sequences of each one's mean; and figures to print."""

    @abstractmethod
    def simulate(self, batch: TrainBatch) -> Simulated:
        """On answers that the target gave greedily: what a chain would have brought."""

    @abstractmethod
    def export(self) -> tuple[str, Any, Mapping[str, Any]]:
        """Method, config and tensors (numpy, canonical names) of a checkpoint."""

    def finish(self, out: Path, train: Packing, held_out: Packing) -> dict[str, float]:
        """Complete the best checkpoint, in ``out``, when the training is over; figures to print."""
        return {}

    def close(self) -> None:
        """Close what ``begin`` opened."""


class HeadObjective(Objective[NetworkT, HeadOptionsT]):
    """A drafter whose output layer is the target's, frozen, over a draft vocabulary."""

    def __init__(
        self,
        network: NetworkT,
        target: TargetParts,
        vocabulary: DraftVocabulary,
        options: HeadOptionsT,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """``target``: embedding, head and norm, all frozen. ``counts`` int64 [V]: how often each token occurs in the
        training data; with them, the most frequent tokens are always candidates. Raises ParameterError."""
        options.check()
        self.network, self.target, self.options = network, target, options
        self.draft_head = DraftHead(target, vocabulary, counts, options.candidates)

    def export(self) -> tuple[str, Any, Mapping[str, Any]]:
        """See ``Objective``."""
        return self.options.method, self.network.config, self.draft_head.tensors(self.network)
