"""``outpace train parallel``, put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from outpace.drafters.learned.configs import ParallelConfig
from outpace.drafters.learned.networks.parallel import ParallelNetwork
from outpace.errors import Argument, ParameterError
from outpace.training.hidden_states import default_layers
from outpace.training.loop import Loop
from outpace.training.objective import Simulated
from outpace.training.objectives.parallel import ParallelObjective, ParallelOptions
from outpace.training.setup import Job, prepared, shaped_as


@dataclass(frozen=True, slots=True)
class ParallelShape:
    """``block``: tokens a draft; ``rank``: of the Markov head, 0: none; ``mask_token``: None: what is said least."""

    block: int = 7
    layers: int = 2
    rank: int = 64
    mask_token: int | None = None

    def check(self) -> None:
        """Raises ParameterError."""
        for name, low, high in (("block", 1, 64), ("layers", 1, 64), ("rank", 0, 4096)):
            if not low <= getattr(self, name) <= high:
                raise ParameterError(Argument(name, getattr(self, name)), f" is out of range: give {low} to {high}")


@contextmanager
def open_run(job: Job, shape: ParallelShape, options: ParallelOptions) -> Iterator[Loop]:
    """A training that is ready to run; raises as ``setup.prepared`` does."""
    options.check()
    shape.check()
    with prepared(job, default_layers) as bench:
        mask = int(np.argmin(bench.counts)) if shape.mask_token is None else shape.mask_token
        if not 0 <= mask < bench.parts.vocab:
            raise ParameterError(Argument("mask_token", mask), f" is out of range: give 0 to {bench.parts.vocab - 1}")
        config = ParallelConfig(
            shaped_as(bench.weights, shape.layers, qk_norm=True), bench.parts.vocab, job.basics.draft_vocab,
            bench.hidden_layers, shape.block, mask, shape.rank, confidence=True,
        )  # fmt: skip
        network = ParallelNetwork(config, job.basics.seed).to(bench.device)
        objective = ParallelObjective(network, bench.parts.to(bench.device), bench.vocabulary, options, bench.counts)
        yield bench.loop("parallel", objective, {**asdict(shape), **asdict(options)})


def simulate_prefixes(loop: Loop, cost: float) -> tuple[Simulated, float]:
    """What the network is worth on held-out answers where its confidence cuts drafts, and tokens drafted at a start.

    ``cost``: of a token more in a draft, as a share of a plain step.
    """
    objective, packing = loop.objective, loop.held_out
    assert isinstance(objective, ParallelObjective)
    batches = packing.cut(range(len(packing.answers)))
    packing.plan(batches)
    pieces = [objective.simulate_prefixes(packing.batch(its), cost) for its in batches]
    found = [its for its, _, _ in pieces]
    drafted, starts = sum(its[1] for its in pieces), sum(its[2] for its in pieces)
    return sum(found[1:], found[0]), drafted / max(starts, 1)
