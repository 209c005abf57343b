"""``outpace train eagle|mtp|parallel|medusa|distil``: options are defined in ``outpace.training.options``."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cli.command import Command, Interrupted
from outpace.cli.options import Common
from outpace.cli.train.data import say
from outpace.common.parameter import REQUIRED, defined
from outpace.errors import ParameterError
from outpace.training import packages
from outpace.training.options import (
    DistilOptions,
    EagleOptions,
    LoopOptions,
    MedusaOptions,
    MtpOptions,
    Options,
    ParallelOptions,
)

if TYPE_CHECKING:
    from outpace.training.loop import Loop


@dataclass(frozen=True, slots=True)
class Place:
    """What is read and written, and where it is computed."""

    data: Path = defined(REQUIRED, "A folder that outpace train data or import made.")
    out: Path = defined(REQUIRED, "The folder to make: what is trained, its curve, snapshots.")
    model: str | None = defined(
        None, "The target; checked against the data. Default: the data's.", option=("--model", "-m")
    )
    resume: bool = defined(False, "Go on from the last snapshot in OUT, perhaps to a greater length.")
    threads: int | None = defined(None, "CPU threads. Default: the cores.", option=("--threads", "-t"))
    device: str = defined("cpu", "Where it trains: cpu, cuda or cuda:N.")


def eagle(place: Place, options: EagleOptions, loop: LoopOptions, common: Common) -> int:
    """Train one decoder layer that drafts from the target's hidden states (EAGLE-3.1). Several processes:
    accelerate launch -m outpace train eagle ...
    """
    return _train(place, options, loop, common)


def mtp(place: Place, options: MtpOptions, loop: LoopOptions, common: Common) -> int:
    """Train the layer of a Qwen 3.5 model's own files that drafts, and write the model with it: --drafter mtp."""
    return _train(place, options, loop, common)


def parallel(place: Place, options: ParallelOptions, loop: LoopOptions, common: Common) -> int:
    """Train two decoder layers that draft a block at once (DSpark)."""
    return _train(place, options, loop, common)


def medusa(place: Place, options: MedusaOptions, loop: LoopOptions, common: Common) -> int:
    """Train heads that each predict a token further ahead (Medusa-1), and search the tree of their candidates."""
    return _train(place, options, loop, common)


def distil(place: Place, options: DistilOptions, loop: LoopOptions, common: Common) -> int:
    """Distil the target into a small decoder, which drafts as --drafter model:OUT."""
    return _train(place, options, loop, common)


def _train(place: Place, options: Options, settings: LoopOptions, common: Common) -> int:
    """Run a training to its end, and print what came of it."""
    with packages():
        from outpace.training.loop import SNAPSHOT
        from outpace.training.objectives import finish, open_run
    from outpace.training.data import read_meta
    from outpace.training.setup import Run

    if not place.resume and (place.out / SNAPSHOT).exists():
        raise ParameterError(f"{place.out} has a training that can go on: give --resume, or another folder as --out")
    if place.resume and not (place.out / SNAPSHOT).exists():
        say(f"{place.out} has no snapshot to go on from: beginning")
    begun = time.perf_counter()
    run = Run(place.data, place.out, settings, place.model, place.threads, place.device, say)
    with open_run(run, options) as loop:
        try:
            if place.resume and loop.resume():
                say(_resumed(loop))
            elif isinstance(options, EagleOptions | DistilOptions) and options.start is not None:
                loop.continue_from(Path(options.start))
            at = loop.run()
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: the best so far and a snapshot are in {place.out}; --resume goes on"
            ) from error
        if loop.team.rank:
            return 0
        figures = finish(loop)
    seconds = time.perf_counter() - begun
    found = {"out": str(place.out), "steps": at.step, "tokens": at.tokens, "tokens_per_step": at.best}
    if common.emit({**found, "seconds": round(seconds, 1), "loss": at.loss, **figures}):
        return 0
    print(f"{place.out}: {at.best:.3f} tokens a step on held-out answers after {at.tokens:,} tokens")
    for name, value in figures.items():
        print(f"  {name.replace('_', ' ')}: {value:.3f}")
    spec = f"{'model' if options.method == 'distil' else options.method}:{place.out}"
    model = place.model or read_meta(place.data)["model"]
    if isinstance(options, MtpOptions):
        model, spec = str(place.out), "mtp"
    print(f"try it: {shlex.join(['outpace', 'generate', '-m', model, '-d', spec, '--compare', 'Hello!'])}")
    return 0


def _resumed(loop: Loop) -> str:
    """Where a training that was resumed stands."""
    at, longer = loop.at, "greater --steps, --epochs or --minutes go on"
    if loop.over:
        return f"this training is finished, {at.step} of {at.total} steps are taken: {longer}"
    return f"going on at step {at.step} of {at.total or '?'}"


COMMANDS = tuple(
    Command(
        function.__name__,
        function,
        f"outpace train {function.__name__} --data answers --out drafter --epochs 4\n"
        f"outpace train {function.__name__} --data answers --out drafter --epochs 8 --resume\n"
        f"outpace train {function.__name__} --data answers --out drafter --minutes 30 --lr 5e-4",
    )
    for function in (eagle, mtp, parallel, medusa, distil)
)
