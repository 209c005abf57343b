"""What each kind of drafter is trained for, and how a training of any kind is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from outpace.training.loop import Loop
from outpace.training.objectives.distil import DistilObjective
from outpace.training.objectives.eagle import EagleObjective
from outpace.training.objectives.medusa import MedusaObjective
from outpace.training.objectives.mtp import MtpObjective
from outpace.training.objectives.parallel import ParallelObjective
from outpace.training.options import DistilOptions, EagleOptions, MedusaOptions, MtpOptions, Options, ParallelOptions
from outpace.training.setup import Run, prepared

_OBJECTIVES: dict[type, Any] = {
    EagleOptions: EagleObjective,
    MtpOptions: MtpObjective,
    MedusaOptions: MedusaObjective,
    ParallelOptions: ParallelObjective,
    DistilOptions: DistilObjective,
}


@contextmanager
def open_run(run: Run, options: Options) -> Iterator[Loop]:
    """A training that is ready to run. Raises as ``setup.prepared`` does, and ModelError for a drafter to begin with
    that cannot be read."""
    options.check()
    kind = _OBJECTIVES[type(options)]
    with ExitStack() as stack:
        setup = stack.enter_context(prepared(run, lambda count: kind.layers(options, count), kind.vocabulary(options)))
        objective = kind.begin(setup, options)
        stack.callback(objective.close)
        yield setup.loop(options.method, objective, asdict(options))


def finish(loop: Loop) -> dict[str, float]:
    """Complete the best checkpoint of a training that is over; figures to print."""
    return loop.objective.finish(loop.out, loop.train, loop.held_out)
