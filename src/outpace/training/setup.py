"""What every training begins with: answers, their target, states, a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outpace.common.allocator import keep_freed
from outpace.drafters.learned.config import Decoder
from outpace.errors import Argument, DataError, ParameterError
from outpace.models.fingerprint import fingerprint
from outpace.models.host import usable_cores
from outpace.models.load import Source, resolve
from outpace.models.options import LoadOptions
from outpace.training.data import Answers
from outpace.training.hidden_states import HiddenStateSource
from outpace.training.loop import Loop, Team, device_named
from outpace.training.objective import NoStates, Objective, Packing, States
from outpace.training.options import MAY_CHANGE, LoopOptions
from outpace.training.target import DraftVocabulary, TargetParts, TargetWeights

I64 = np.typing.NDArray[np.int64]
DRAFT_VOCAB = 8192  # most tokens that can be drafted, where nothing says how many


@dataclass(frozen=True, slots=True)
class Run:
    """A training of any method: on the folder ``data``, into ``out``. ``model``: the target (None: as the data names
    it); ``threads``: None: the cores; ``device``: where the network is trained; ``say`` is called with a line now and
    then.
    """

    data: Path
    out: Path
    options: LoopOptions
    model: str | None = None
    threads: int | None = None
    device: str = "cpu"
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, slots=True)
class Setup:
    """A target and its answers, ready to train beside. ``states``: of the answers to train on; ``counts`` int64 [V]: of
    tokens in these answers and their prompts. ``parts`` are on the CPU, where a network begins; batches on ``device``.
    """

    run: Run
    answers: Answers
    source: Source
    weights: TargetWeights
    parts: TargetParts
    hidden_layers: tuple[int, ...]
    states: States
    train: Packing
    held_out: Packing
    counts: I64
    vocabulary: DraftVocabulary
    team: Team

    @property
    def device(self) -> torch.device:
        return self.team.device

    def loop(self, method: str, objective: Objective[Any, Any], recipe: Mapping[str, Any]) -> Loop:
        """A loop that is ready to run. ``recipe``: the method's own, which a snapshot has to share, beside data,
        target and the loop's options."""
        run = self.run
        shared = {
            "method": method, "data": self.answers.hash, "target": self.answers.target["fingerprint"],
            **{name: value for name, value in asdict(run.options).items() if name not in MAY_CHANGE},
            "hidden_layers": self.hidden_layers,
        }  # fmt: skip
        # A name that is the method's and the loop's would hide one of them; "hidden_layers" are the resolved ones.
        assert not (hidden := {*recipe} & {*shared} - {"hidden_layers"}), f"{hidden} means two things in a recipe"
        return Loop(
            objective, self.train, self.held_out, run.out, run.options, {**recipe, **shared}, self.answers.target,
            self.team, run.say,
        )  # fmt: skip


@contextmanager
def prepared(
    run: Run, hidden_layers: Callable[[int], tuple[int, ...] | None], vocabulary: DraftVocabulary | None = None
) -> Iterator[Setup]:
    """Open the answers and the target that gave them. ``hidden_layers``: the layers to read of so many
    (None: no states are needed); ``vocabulary``: what can be drafted where the options do not say it (None: the most
    frequent tokens).

    Raises DataError for answers of another target, ParameterError for options, ModelError.
    """
    run.options.check()
    device = device_named(run.device)
    settings, threads = run.options, run.threads
    answers = Answers.open(run.data)
    load_options = LoadOptions(**answers.meta["load"])
    source = resolve(run.model or answers.meta["model"], load_options)
    if (found := fingerprint(source.path)) != answers.target["fingerprint"]:
        raise DataError(
            f"{run.data} has answers of the target {answers.target['fingerprint']}, but {source.name} is {found}: make "
            "answers of this one, or give theirs as ", Argument("model"),
        )  # fmt: skip
    torch.set_num_threads(threads or usable_cores())
    keep_freed()
    run.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        team = Team(device)
        stack.callback(team.close)
        weights = TargetWeights(source)
        layers = hidden_layers(weights.decoder.layers)
        train, held_out = split(answers, settings)

        def states_of(part: Answers) -> States:
            return NoStates(part) if layers is None else HiddenStateSource(part, layers, threads=threads)

        states = [stack.enter_context(closing(states_of(part))) for part in (train, held_out)]
        counts = train.token_counts(prompts=True)
        if vocabulary is None or settings.draft_vocab is not None:
            size = min(DRAFT_VOCAB, len(counts)) if settings.draft_vocab is None else settings.draft_vocab
            vocabulary = DraftVocabulary.by_frequency(train.token_counts(), size)
        if team.rank == 0:
            covered = vocabulary.coverage(held_out.token_counts(prompts=False))
            run.say(
                f"{len(train):,} answers of {int(train.lengths().sum()):,} tokens to train on, {len(held_out):,} to be "
                f"judged on; the draft vocabulary has {covered:.1%} of these answers' tokens"
            )

        def packed(part: Answers, source: States, prompts: float, loops: float) -> Packing:
            budget, longest = settings.tokens, settings.longest
            assert longest is not None, "check has set it"
            return Packing(part, source, budget, longest, prompts, settings.seed, team.device, loop_weight=loops)

        yield Setup(
            run, answers, source, weights, weights.parts(), layers or (), states[0],
            packed(train, states[0], settings.prompt_weight, settings.loop_weight),
            packed(held_out, states[1], 0.0, 1.0), counts, vocabulary, team,
        )  # fmt: skip


def split(answers: Answers, options: LoopOptions) -> tuple[Answers, Answers]:
    """To train on, and to be judged on: held-out greedy answers. Raises ParameterError when there are none."""
    train, out = answers.split(options.held_out, options.split_seed)
    greedy = np.flatnonzero(np.array([answer.temperature == 0 for answer in out], bool))
    if not len(greedy):
        raise ParameterError(
            f"no greedy answer is held out: make some (outpace train data -T 0), or more than {len(answers)} answers"
        )
    count = int(np.searchsorted(np.cumsum(out.lengths()[greedy]), options.judged)) + 1
    return train, out.select(greedy[:count])


def shaped_as(weights: TargetWeights, layers: int, qk_norm: bool = False) -> Decoder:
    """A decoder of ``layers`` layers like the target's, which rotates whole heads and stretches nothing."""
    target = weights.decoder
    return Decoder(
        hidden=target.hidden, layers=layers, heads=target.heads, kv_heads=target.kv_heads, head_dim=target.head_dim,
        ffn=target.inner, eps=target.eps, rope_theta=target.ropes[0].base, max_length=target.max_length,
        qk_norm=qk_norm,
    )  # fmt: skip
