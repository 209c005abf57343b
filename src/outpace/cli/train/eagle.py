"""``outpace train eagle``: an EAGLE drafter for the target whose answers a folder has."""

from __future__ import annotations

from typing import Annotated

from outpace.cli.command import Command, option
from outpace.cli.options import Common
from outpace.cli.train.training import Training, train


def run(
    its: Training,
    common: Common,
    steps_ttt: Annotated[int, option("--steps-ttt", help="Entries that are unrolled in training.")] = 3,
    share: Annotated[float, option("--share", help="Of entries that are unrolled beyond the first.")] = 0.5,
    loss: Annotated[str, option("--loss", help="ce, kl, reverse, tv, lk, hybrid or length.")] = "ce",
    decay: Annotated[float, option("--decay", help="Unrolled entry i counts decay^i.")] = 0.9,
    candidates: Annotated[
        int, option("--candidates", help="Rows of the head a batch is trained against. 0: all.")
    ] = 2048,
    hidden_layers: Annotated[
        list[int] | None,
        option("--hidden-layer", help="Repeatable: a layer whose output it reads, from 0. Default: the usual three."),
    ] = None,
    init: Annotated[str, option("--init", help="fresh, layer, now, next, layer+now or layer+next.")] = "next",
    start: Annotated[
        str | None, option("--start", help="A drafter to begin with, such as one trained on fewer answers.")
    ] = None,
    noise: Annotated[float, option("--noise", help="In the hidden states, as a share of their size.")] = 0.0,
    dropout: Annotated[float, option("--dropout", help="Share of hidden states left out.")] = 0.0,
    depth: Annotated[int, option("--depth", help="Tokens of a simulated chain.")] = 4,
) -> int:
    """Train one decoder layer that drafts from the target's hidden states (EAGLE-3.1). Several processes:
    accelerate launch -m outpace train eagle ...
    """
    from outpace.training.eagle import EagleShape, open_run
    from outpace.training.objectives.eagle import EagleOptions

    options = EagleOptions(
        steps_ttt=steps_ttt, share=share, decay=decay, loss=loss, candidates=candidates, noise=noise, dropout=dropout,
        depth=depth,
    )  # fmt: skip
    shape = EagleShape(init=init, hidden_layers=tuple(hidden_layers or ()), start=start)
    return train(common, its, open_run(its.job(), shape, options))


COMMAND = Command("eagle", run, "outpace train eagle --data answers --out drafter --epochs 4")
