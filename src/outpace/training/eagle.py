"""``outpace train eagle``, put together: data, target, network, objective, loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.arrays import F32
from outpace.drafters.learned.checkpoint import read
from outpace.drafters.learned.configs import Decoder, EagleConfig
from outpace.errors import Argument, DataError, ParameterError
from outpace.models.fingerprint import fingerprint
from outpace.models.load import resolve
from outpace.models.options import LoadOptions
from outpace.models.processors import usable_cores
from outpace.training.data import Answers
from outpace.training.initial import initialise
from outpace.training.loop import Loop, LoopOptions
from outpace.training.networks.eagle import EagleNetwork
from outpace.training.objectives.eagle import EagleObjective, EagleOptions
from outpace.training.packing import Packing
from outpace.training.processes import Team, keep_memory
from outpace.training.states import TapSource
from outpace.training.taps import default_layers
from outpace.training.target import TargetWeights
from outpace.training.vocabulary import DraftVocabulary

_SAMPLE = 20_000  # tokens whose states the initialisation sees


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made of the data. ``tokens`` a batch, answers cut at ``longest``; ``prompts``: loss there, too; ``share``
    of the prompts ``held_out``, of whose greedy answers at most ``judged`` tokens are simulated on.
    """

    draft_vocab: int = 8192
    init: str = "next"
    tokens: int = 3072
    longest: int = 2048
    prompts: bool = True
    held_out: float = 0.05
    judged: int = 12_000
    taps: tuple[int, ...] = ()
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    seed: int = 0
    start: str | None = None  # a drafter whose weights and vocabulary it begins with


def config_of(weights: TargetWeights, recipe: Recipe, taps: tuple[int, ...]) -> EagleConfig:
    """A layer shaped as the target's. ``taps``: outputs of layers, from 0."""
    its = weights.decoder
    decoder = Decoder(
        hidden=its.hidden, layers=1, heads=its.heads, kv_heads=its.kv_heads, head_dim=its.head_dim, ffn=its.inner,
        eps=its.eps, rope_theta=_base(its.ropes[0], its.head_dim), max_length=its.max_length,
    )  # fmt: skip
    return EagleConfig(
        decoder=decoder, vocab=its.vocab, draft_vocab=recipe.draft_vocab, taps=taps,
        norm_before_residual=recipe.norm_before_residual, fc_norm=recipe.fc_norm, norm_output=recipe.norm_output,
        norm_before_fc=False,
    )  # fmt: skip


def _base(frequencies: F32, head_dim: int) -> float:
    """The rope base that inverse frequencies [d / 2] came from, to four digits; stretched ones give one near theirs."""
    return float(f"{float(frequencies[1]) ** (-head_dim / 2):.4g}")


def split(answers: Answers, recipe: Recipe) -> tuple[Answers, Answers]:
    """To train on, and to be judged on: held-out greedy answers. Raises ParameterError when there are none."""
    train, out = answers.split(recipe.held_out, recipe.seed)
    greedy = np.flatnonzero(np.array([answer.temperature == 0 for answer in out], bool))
    if not len(greedy):
        raise ParameterError(
            f"no greedy answer is held out: make some (outpace train data -T 0), or more than {len(answers)} answers"
        )
    count = int(np.searchsorted(np.cumsum(out.lengths()[greedy]), recipe.judged)) + 1
    return train, out.select(greedy[:count])


@contextmanager
def open_run(
    data: Path,
    out: Path,
    model: str | None,
    recipe: Recipe,
    eagle: EagleOptions,
    loop: LoopOptions,
    threads: int | None,
    say: Callable[[str], None],
) -> Iterator[Loop]:
    """A training on the folder ``data``, ready to run. ``model``: the target's name (None: as the data has it).

    Raises DataError for answers of another target, ParameterError for options, ModelError.
    """
    loop.check()
    eagle.check()
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
    team = Team()
    with ExitStack() as stack:
        stack.callback(team.close)
        weights = TargetWeights(source)
        parts = weights.parts()
        taps = recipe.taps or default_layers(weights.decoder.layers)
        train, held_out = split(answers, recipe)
        states = [stack.enter_context(TapSource(its, taps, threads=threads)) for its in (train, held_out)]
        counts = train.token_counts(prompts=True)
        config = config_of(weights, recipe, taps)
        network = EagleNetwork(config)
        if recipe.start is None:
            vocabulary = DraftVocabulary.by_frequency(counts, recipe.draft_vocab)
            initialise(network, recipe.init, weights, parts, _sample(train, states[0], recipe.seed), recipe.seed)
        else:
            vocabulary = _begin_with(Path(recipe.start), network, answers.target)
        objective = EagleObjective(network, parts, vocabulary, eagle, counts)
        if team.rank == 0:
            covered = vocabulary.coverage(held_out.token_counts(prompts=False))
            say(
                f"{len(train):,} answers of {int(train.lengths().sum()):,} tokens to train on, {len(held_out):,} to be "
                f"judged on; the draft vocabulary has {covered:.1%} of these answers' tokens"
            )
        yield Loop(
            objective,
            Packing(train, states[0], recipe.tokens, recipe.longest, recipe.prompts, recipe.seed),
            Packing(held_out, states[1], recipe.tokens, recipe.longest, False, recipe.seed),
            out, loop, _identity(answers, taps, recipe, eagle, loop), answers.target, team, say,
        )  # fmt: skip


def _begin_with(path: Path, network: EagleNetwork, target: Mapping[str, Any]) -> DraftVocabulary:
    """Give the network the weights of a drafter of the same shape beside the same target. Raises ParameterError."""
    its = read(path)
    if its.method != "eagle" or its.config != network.config:
        raise ParameterError(f"{path} is another kind of drafter than this one: begin with one of the same shape")
    if its.target.get("fingerprint") != target["fingerprint"]:
        raise ParameterError(f"{path} was trained beside another target: begin with one of this target")
    network.load_state_dict({name: torch.from_numpy(its.tensors[name]) for name in network.state_dict()})
    ids = its.tensors["d2t"] + np.arange(len(its.tensors["d2t"]))
    return DraftVocabulary.of(ids, network.config.vocab)


def _sample(answers: Answers, states: TapSource, seed: int) -> Iterator[Tensor]:
    order = np.random.default_rng(seed).permutation(len(answers))
    chosen = order[: int(np.searchsorted(np.cumsum(answers.lengths()[order]), _SAMPLE)) + 1].tolist()
    states.plan(chosen)
    return (states.states(i) for i in chosen)


def _identity(
    answers: Answers, taps: tuple[int, ...], recipe: Recipe, eagle: EagleOptions, loop: LoopOptions
) -> dict[str, Any]:
    """What has to be the same for a training to go on; it is the checkpoint's recipe, too."""
    free = ("snapshot", "report", "patience")
    return {
        "method": "eagle", "data": answers.hash, "target": answers.target["fingerprint"], **asdict(recipe),
        **asdict(eagle), **{name: value for name, value in asdict(loop).items() if name not in free}, "taps": taps,
    }  # fmt: skip
