"""``outpace train medusa``, put together; and the search of its tree when the heads are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from outpace.drafters.learned import checkpoint as checkpoints
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.configs import MedusaConfig
from outpace.drafters.learned.networks.medusa import MedusaNetwork
from outpace.errors import Argument, ParameterError
from outpace.training.loop import Loop
from outpace.training.objective import Simulated
from outpace.training.objectives.medusa import MedusaObjective, MedusaOptions
from outpace.training.setup import Job, prepared

_MEASURED = 40_000  # tokens of training answers that the tree is searched on


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """``heads``: tokens ahead; ``layers``: residual blocks of each."""

    heads: int = 4
    layers: int = 1

    def check(self) -> None:
        """Raises ParameterError."""
        for name in ("heads", "layers"):
            if not 1 <= getattr(self, name) <= 64:
                raise ParameterError(Argument(name, getattr(self, name)), " is out of range: give 1 to 64")


@contextmanager
def open_run(job: Job, shape: MedusaShape, options: MedusaOptions) -> Iterator[Loop]:
    """A training that is ready to run; raises as ``setup.prepared`` does. It reads no hidden states."""
    options.check()
    shape.check()
    with prepared(job, lambda layers: ()) as bench:
        parts = bench.parts.to(bench.device)
        config = MedusaConfig(parts.hidden, parts.vocab, job.basics.draft_vocab, shape.heads, shape.layers)
        network = MedusaNetwork(config).to(bench.device)
        objective = MedusaObjective(network, parts, bench.vocabulary, options, bench.counts)
        yield bench.loop("medusa", objective, {**asdict(shape), **asdict(options)})


def plant(loop: Loop) -> Simulated:
    """Search the best checkpoint's tree on answers that it was trained on, and write it again with it.

    Returns what the tree is worth on held-out answers, so not on those that it was chosen by.
    """
    objective, kept = loop.objective, checkpoints.read(loop.out)
    assert isinstance(objective, MedusaObjective)
    names = objective.network.state_dict()
    objective.network.load_state_dict({name: torch.from_numpy(kept.tensors[name]) for name in names})
    packing, tokens, members = loop.train, 0, list[int]()
    for i in packing.cut(range(len(packing.answers))):
        members += i
        tokens += int(packing.answers.lengths()[i].sum())
        if tokens >= _MEASURED:
            break
    batches = packing.cut(members)
    packing.plan(batches)
    tree = objective.plant(packing.batch(its) for its in batches)
    method, config, tensors = objective.export()
    write_checkpoint(loop.out, method, config, tensors, kept.target, kept.recipe)
    batches = loop.held_out.cut(range(len(loop.held_out.answers)))
    loop.held_out.plan(batches)
    found = [objective.simulate_tree(loop.held_out.batch(its), tree) for its in batches]
    return sum(found[1:], found[0])
