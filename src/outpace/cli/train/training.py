"""Options that the commands which train share, and how a training runs."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from outpace.cli.command import Interrupted, option
from outpace.cli.options import Common
from outpace.cli.train.shared import say
from outpace.errors import ParameterError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from outpace.training.loop import Loop
    from outpace.training.setup import Job

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Training:
    """Where, how long and how fast."""

    data: Annotated[Path, option("--data", help="A folder that outpace train data or import made.")]
    out: Annotated[Path, option("--out", help="The folder to make: what is trained, its curve, snapshots.")]
    model: Annotated[
        str | None, option("--model", "-m", help="The target; checked against the data. Default: the data's.")
    ] = None
    minutes: Annotated[float | None, option("--minutes", help="Train about so long.")] = None
    epochs: Annotated[float | None, option("--epochs", help="Train on all answers so often.")] = None
    steps: Annotated[int | None, option("--steps", help="Train so many steps.")] = None
    resume: Annotated[bool, option("--resume", help="Go on from the last snapshot in OUT.")] = False
    draft_vocab: Annotated[
        int, option("--draft-vocab", metavar="N", help="Tokens it learns to say, the most frequent.")
    ] = 8192
    prompts: Annotated[bool, option("--prompts", help="Learn from prompts, too.")] = True
    lr: Annotated[float, option("--lr", help="Greatest learning rate.")] = 1e-3
    optimiser: Annotated[str, option("--optimiser", help="muon or adamw.")] = "muon"
    weight_decay: Annotated[float, option("--weight-decay", help="Of matrices.")] = 0.01
    warm_up: Annotated[int, option("--warm-up", help="Steps until the greatest learning rate.")] = 40
    clip: Annotated[float, option("--clip", help="Greatest norm of a gradient.")] = 1.0
    tokens: Annotated[int, option("--tokens", help="Tokens a batch.")] = 3072
    longest: Annotated[int, option("--longest", help="Tokens an answer is cut at, its prompt included.")] = 2048
    gather: Annotated[int, option("--gather", help="Batches a step, of all processes together.")] = 1
    bfloat16: Annotated[bool, option("--bfloat16", help="Products in bfloat16, where the processor has them.")] = False
    held_out: Annotated[float, option("--held-out", help="Share of prompts that it is judged on.")] = 0.05
    judged: Annotated[int, option("--judged", help="Most tokens of these that are simulated on.")] = 12_000
    evaluate: Annotated[int, option("--evaluate", help="Steps between two evaluations.")] = 200
    patience: Annotated[int, option("--patience", help="Evaluations without a gain until it stops; 0: none.")] = 0
    snapshot: Annotated[float, option("--snapshot", help="Seconds between two snapshots.")] = 300.0
    report: Annotated[float, option("--report", help="Seconds between two lines.")] = 10.0
    seed: Annotated[int, option("--seed", help="Of all that is drawn.")] = 0
    threads: Annotated[int | None, option("--threads", "-t", help="CPU threads. Default: the cores.")] = None
    device: Annotated[str, option("--device", help="Where it trains: cpu, cuda or cuda:N.")] = "cpu"

    def job(self) -> Job:
        from outpace.training.loop import LoopOptions
        from outpace.training.setup import Basics, Job

        def made(kind: type[T]) -> T:
            return kind(**{its.name: getattr(self, its.name) for its in fields(kind)})

        return Job(self.data, self.out, made(LoopOptions), made(Basics), self.model, self.threads, self.device, say)


def train(
    common: Common,
    its: Training,
    opened: AbstractContextManager[Loop],
    after: Callable[[Loop], dict[str, Any]] = lambda loop: {},
) -> int:
    """Run a training to its end, and say what came of it. ``after``: what is done with the best, in the first process;
    figures to print."""
    from outpace.training.snapshots import NAME

    if not its.resume and (its.out / NAME).exists():
        raise ParameterError(f"{its.out} has a training that can go on: give --resume, or another folder as --out")
    begun = time.perf_counter()
    with opened as loop:
        try:
            if its.resume and loop.resume():
                say(f"going on at step {loop.at.step}")
            at = loop.run()
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: the best so far and a snapshot are in {its.out}; --resume goes on"
            ) from error
        if loop.team.rank:
            return 0
        more = after(loop)
    seconds = time.perf_counter() - begun
    if common.json:
        found = {"out": str(its.out), "steps": at.step, "tokens": at.tokens, "tokens_per_step": at.best}
        print(json_.dumps({**found, "seconds": round(seconds, 1), "loss": at.loss, **more}))
        return 0
    print(f"{its.out}: {at.best:.3f} tokens a step on held-out answers after {at.tokens:,} tokens")
    for name, value in more.items():
        print(f"  {name.replace('_', ' ')}: {value:.3f}" if isinstance(value, float) else f"  {name}: {value}")
    return 0
