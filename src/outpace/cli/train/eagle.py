"""``outpace train eagle``: an EAGLE drafter for the target whose answers a folder has."""

from __future__ import annotations

import json as json_
import time
from pathlib import Path
from typing import Annotated

import typer

from outpace.cli.command import Interrupted, flatten
from outpace.cli.options import Common
from outpace.cli.train.shared import say
from outpace.errors import ParameterError


def register(app: typer.Typer) -> None:
    app.command("eagle", epilog="Example: outpace train eagle --data answers --out drafter --epochs 4")(flatten(run))


def run(
    common: Common,
    data: Annotated[Path, typer.Option("--data", help="A folder that outpace train data or import made.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to make: the drafter, its curve, snapshots.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The target; checked against the data. Default: the data's.")
    ] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Train about so long.")] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", help="Train on all answers so often.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Train so many steps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last snapshot in OUT.")] = False,
    steps_ttt: Annotated[int, typer.Option("--steps-ttt", help="Entries that are unrolled in training.")] = 3,
    share: Annotated[float, typer.Option("--share", help="Of entries that are unrolled beyond the first.")] = 0.5,
    loss: Annotated[str, typer.Option("--loss", help="ce, kl, tv, lk or hybrid.")] = "ce",
    decay: Annotated[float, typer.Option("--decay", help="Unrolled entry i counts decay^i.")] = 0.9,
    candidates: Annotated[
        int, typer.Option("--candidates", help="Rows of the head a batch is trained against. 0: all.")
    ] = 2048,
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", metavar="N", help="Tokens it can draft.")] = 8192,
    init: Annotated[str, typer.Option("--init", help="fresh, layer, now, next, layer+now or layer+next.")] = "next",
    start: Annotated[
        str | None, typer.Option("--start", help="A drafter to begin with, such as one trained on fewer answers.")
    ] = None,
    prompts: Annotated[bool, typer.Option("--prompts/--no-prompts", help="Learn from prompts, too.")] = True,
    lr: Annotated[float, typer.Option("--lr", help="Greatest learning rate.")] = 1e-3,
    optimiser: Annotated[str, typer.Option("--optimiser", help="muon or adamw.")] = "muon",
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of matrices.")] = 0.01,
    warm_up: Annotated[int, typer.Option("--warm-up", help="Steps until the greatest learning rate.")] = 40,
    clip: Annotated[float, typer.Option("--clip", help="Greatest norm of a gradient.")] = 1.0,
    noise: Annotated[float, typer.Option("--noise", help="In the taps, as a share of their size.")] = 0.0,
    dropout: Annotated[float, typer.Option("--dropout", help="Share of taps left out.")] = 0.0,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens a batch.")] = 3072,
    longest: Annotated[int, typer.Option("--longest", help="Tokens an answer is cut at, its prompt included.")] = 2048,
    gather: Annotated[int, typer.Option("--gather", help="Batches a step, of all processes together.")] = 1,
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Products in bfloat16, where the processor has them.")
    ] = (False),
    held_out: Annotated[float, typer.Option("--held-out", help="Share of prompts that it is judged on.")] = 0.05,
    judged: Annotated[int, typer.Option("--judged", help="Most tokens of these that are simulated on.")] = 12_000,
    depth: Annotated[int, typer.Option("--depth", help="Tokens of a simulated chain.")] = 4,
    evaluate: Annotated[int, typer.Option("--evaluate", help="Steps between two evaluations.")] = 200,
    patience: Annotated[
        int, typer.Option("--patience", help="Evaluations without a gain until it stops; 0: none.")
    ] = 0,
    snapshot: Annotated[float, typer.Option("--snapshot", help="Seconds between two snapshots.")] = 300.0,
    report: Annotated[float, typer.Option("--report", help="Seconds between two lines.")] = 10.0,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")] = 0,
    threads: Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads. Default: the cores.")] = None,
) -> int:
    """Train one decoder layer that drafts from the target's hidden states (EAGLE-3.1). Several processes:
    accelerate launch -m outpace train eagle ...
    """
    from outpace.training.eagle import Recipe, open_run
    from outpace.training.loop import LoopOptions
    from outpace.training.objectives.eagle import EagleOptions
    from outpace.training.snapshots import NAME

    if not resume and (out / NAME).exists():
        raise ParameterError(f"{out} has a training that can go on: give --resume, or another folder as --out")
    training = open_run(
        data,
        out,
        model,
        Recipe(
            draft_vocab=draft_vocab, init=init, tokens=tokens, longest=longest, prompts=prompts, held_out=held_out,
            judged=judged, seed=seed, start=start,
        ),
        EagleOptions(
            steps=steps_ttt, share=share, decay=decay, loss=loss, candidates=candidates, noise=noise, dropout=dropout,
            depth=depth,
        ),
        LoopOptions(
            steps=steps, epochs=epochs, minutes=minutes, lr=lr, optimiser=optimiser, weight_decay=weight_decay,
            warm_up=warm_up, clip=clip, gather=gather, bfloat16=bfloat16, evaluate=evaluate, patience=patience,
            snapshot=snapshot, report=report, seed=seed,
        ),
        threads,
        say,
    )  # fmt: skip
    begun = time.perf_counter()
    with training as loop:
        try:
            if resume and loop.resume():
                say(f"going on at step {loop.at.step}")
            at = loop.run()
        except KeyboardInterrupt as error:
            raise Interrupted(f"interrupted: the best so far and a snapshot are in {out}; --resume goes on") from error
        rank = loop.team.rank
    seconds = time.perf_counter() - begun
    if rank:
        return 0
    if common.json:
        found = {"out": str(out), "steps": at.step, "tokens": at.tokens, "tokens_per_step": at.best}
        print(json_.dumps({**found, "seconds": round(seconds, 1), "loss": at.loss}))
    else:
        print(f"{out}: {at.best:.3f} tokens a step on held-out answers after {at.tokens:,} tokens")
    return 0
