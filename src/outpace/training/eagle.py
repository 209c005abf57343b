"""``outpace train eagle``, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.drafters.learned.checkpoint import Checkpoint, read
from outpace.drafters.learned.configs import EagleConfig
from outpace.drafters.learned.networks.eagle import EagleNetwork
from outpace.errors import Argument, ParameterError
from outpace.training.hidden_states import default_layers
from outpace.training.initial import initialise
from outpace.training.loop import Loop
from outpace.training.objectives.eagle import EagleObjective, EagleOptions
from outpace.training.setup import Bench, Job, prepared, shaped_as
from outpace.training.vocabulary import DraftVocabulary

_SAMPLE = 20_000  # tokens whose states the initialisation sees


@dataclass(frozen=True, slots=True)
class EagleShape:
    """``hidden_layers``: outputs of layers, from 0 (none: the usual); the norms as in ``EagleConfig``. ``init``: see
    ``initial.initialise``; ``start``: a drafter whose weights and vocabulary it begins with instead."""

    init: str = "next"
    hidden_layers: tuple[int, ...] = ()
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    start: str | None = None


@contextmanager
def open_run(job: Job, shape: EagleShape, options: EagleOptions) -> Iterator[Loop]:
    """A training that is ready to run; raises as ``setup.prepared`` does, and ModelError for a drafter to begin with
    that cannot be read."""
    options.check()
    if list(shape.hidden_layers) != sorted(set(shape.hidden_layers)):
        raise ParameterError(
            Argument("hidden_layers", list(shape.hidden_layers)), ": name layers in ascending order, each once"
        )
    start = None if shape.start is None else _start(Path(shape.start))
    words = None if start is None else _words_of(start)
    with prepared(job, lambda layers: shape.hidden_layers or default_layers(layers), words) as bench:
        config = EagleConfig(
            decoder=shaped_as(bench.weights, 1), vocab=bench.parts.vocab, draft_vocab=job.basics.draft_vocab,
            hidden_layers=bench.hidden_layers, norm_before_residual=shape.norm_before_residual, fc_norm=shape.fc_norm,
            norm_output=shape.norm_output, norm_before_fc=False,
        )  # fmt: skip
        network = EagleNetwork(config)
        if start is None:
            initialise(network, shape.init, bench.weights, bench.parts, _sample(bench), job.basics.seed)
        else:
            _begin_with(start, f"{shape.start}", network, bench.answers.target)
        network.to(bench.device)
        objective = EagleObjective(network, bench.parts.to(bench.device), bench.vocabulary, options, bench.counts)
        yield bench.loop("eagle", objective, {**asdict(shape), **asdict(options)})


def _start(path: Path) -> Checkpoint:
    its = read(path)
    if its.method != "eagle":
        raise ParameterError(f"{path} is a drafter of the method {its.method}: begin with one of eagle")
    return its


def _words_of(its: Checkpoint) -> DraftVocabulary:
    return DraftVocabulary.of(its.tensors["d2t"] + np.arange(len(its.tensors["d2t"])), its.config.vocab)


def _begin_with(its: Checkpoint, name: str, network: EagleNetwork, target: Mapping[str, Any]) -> None:
    """Give the network the weights of a drafter of the same shape beside the same target. Raises ParameterError."""
    if its.target.get("fingerprint") != target["fingerprint"]:
        raise ParameterError(f"{name} was trained beside another target: begin with one of this target")
    if its.config != network.config:
        raise ParameterError(f"{name} is {its.config}, not {network.config}: begin with one of the same shape")
    network.load_state_dict({name: torch.from_numpy(its.tensors[name]) for name in network.state_dict()})


def _sample(bench: Bench) -> Iterator[Tensor]:
    answers, states = bench.train.answers, bench.states
    order = np.random.default_rng(bench.job.basics.seed).permutation(len(answers))
    chosen = order[: int(np.searchsorted(np.cumsum(answers.lengths()[order]), _SAMPLE)) + 1].tolist()
    states.plan(chosen)
    return (states.states(i) for i in chosen)
