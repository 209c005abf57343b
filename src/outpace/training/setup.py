"""What every training begins with: answers, their target, states, a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace.drafters.learned.configs import Decoder
from outpace.errors import Argument, DataError, ParameterError
from outpace.models.fingerprint import fingerprint
from outpace.models.load import Source, resolve
from outpace.models.options import LoadOptions
from outpace.models.processors import usable_cores
from outpace.training.data import Answers
from outpace.training.loop import Loop, LoopOptions
from outpace.training.objective import Objective
from outpace.training.packing import Packing
from outpace.training.processes import Team, keep_memory
from outpace.training.states import TapSource
from outpace.training.target import TargetParts, TargetWeights
from outpace.training.vocabulary import DraftVocabulary

I64 = np.typing.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Basics:
    """What is made of the data, whatever is trained. ``tokens`` a batch, answers cut at ``longest``; ``prompts``: loss
    there, too; ``held_out``: the share of prompts of whose greedy answers at most ``judged`` tokens are simulated on.
    """

    draft_vocab: int = 8192
    tokens: int = 3072
    longest: int = 2048
    prompts: bool = True
    held_out: float = 0.05
    judged: int = 12_000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Bench:
    """A target and its answers, ready to train beside. ``counts`` int64 [V]: of tokens in answers and prompts."""

    answers: Answers
    source: Source
    weights: TargetWeights
    parts: TargetParts
    taps: tuple[int, ...]
    train: Packing
    held_out: Packing
    counts: I64
    vocabulary: DraftVocabulary
    basics: Basics
    team: Team

    def loop(
        self,
        kind: Callable[..., Loop],
        method: str,
        objective: Objective,
        out: Path,
        options: LoopOptions,
        say: Callable[[str], None],
        recipe: Mapping[str, Any],
    ) -> Loop:
        """A loop of class ``kind``. ``recipe``: the method's own, which a snapshot has to share, beside data, target,
        basics and the loop's options."""
        free = ("snapshot", "report", "patience")
        identity = {
            "method": method, "data": self.answers.hash, "target": self.answers.target["fingerprint"],
            **asdict(self.basics), **{n: v for n, v in asdict(options).items() if n not in free},
            "taps": self.taps, **recipe,
        }  # fmt: skip
        return kind(objective, self.train, self.held_out, out, options, identity, self.answers.target, self.team, say)


@contextmanager
def prepared(
    data: Path,
    out: Path,
    model: str | None,
    basics: Basics,
    taps: Callable[[int], tuple[int, ...]],
    threads: int | None,
    say: Callable[[str], None],
) -> Iterator[Bench]:
    """Open the folder ``data`` and the target that answered. ``model``: its name (None: as the data has it); ``taps``:
    which layers' outputs are read, of how many there are.

    Raises DataError for answers of another target, ParameterError for options, ModelError.
    """
    answers = Answers.open(data)
    options = LoadOptions(**answers.meta["load"])
    source = resolve(model or answers.meta["model"], options)
    if (found := fingerprint(source.path)) != answers.target["fingerprint"]:
        raise DataError(
            f"{data} has answers of the target {answers.target['fingerprint']}, but {source.name} is {found}: make "
            "answers of this one, or give theirs as ", Argument("model"),
        )  # fmt: skip
    torch.set_num_threads(threads or usable_cores())
    keep_memory()
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        team = Team()
        stack.callback(team.close)
        weights = TargetWeights(source)
        layers = taps(weights.decoder.layers)
        train, held_out = split(answers, basics)
        states = [stack.enter_context(TapSource(its, layers, threads=threads)) for its in (train, held_out)]
        counts = train.token_counts(prompts=True)
        vocabulary = DraftVocabulary.by_frequency(counts, basics.draft_vocab)
        if team.rank == 0:
            covered = vocabulary.coverage(held_out.token_counts(prompts=False))
            say(
                f"{len(train):,} answers of {int(train.lengths().sum()):,} tokens to train on, {len(held_out):,} to be "
                f"judged on; the draft vocabulary has {covered:.1%} of these answers' tokens"
            )
        yield Bench(
            answers, source, weights, weights.parts(), layers,
            Packing(train, states[0], basics.tokens, basics.longest, basics.prompts, basics.seed),
            Packing(held_out, states[1], basics.tokens, basics.longest, False, basics.seed),
            counts, vocabulary, basics, team,
        )  # fmt: skip


def split(answers: Answers, basics: Basics) -> tuple[Answers, Answers]:
    """To train on, and to be judged on: held-out greedy answers. Raises ParameterError when there are none."""
    train, out = answers.split(basics.held_out, basics.seed)
    greedy = np.flatnonzero(np.array([answer.temperature == 0 for answer in out], bool))
    if not len(greedy):
        raise ParameterError(
            f"no greedy answer is held out: make some (outpace train data -T 0), or more than {len(answers)} answers"
        )
    count = int(np.searchsorted(np.cumsum(out.lengths()[greedy]), basics.judged)) + 1
    return train, out.select(greedy[:count])


def shaped_as(weights: TargetWeights, layers: int, qk_norm: bool) -> Decoder:
    """A decoder of ``layers`` layers like the target's."""
    its = weights.decoder
    # Of scaled frequencies, the base that their second has: near enough, a drafter learns its own.
    base = float(round(float(its.ropes[0][1]) ** (-its.head_dim / 2), 3))
    return Decoder(
        hidden=its.hidden, layers=layers, heads=its.heads, kv_heads=its.kv_heads, head_dim=its.head_dim, ffn=its.inner,
        eps=its.eps, rope_theta=base, max_length=its.max_length, qk_norm=qk_norm,
    )  # fmt: skip
