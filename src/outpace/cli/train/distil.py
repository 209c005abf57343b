"""``outpace train distil``: a small model that says what the target would."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outpace.cli.command import flatten
from outpace.cli.options import Common
from outpace.cli.train.training import Training, train


def register(app: typer.Typer) -> None:
    app.command("distil", epilog="Example: outpace train distil --data answers --out student --epochs 4")(flatten(run))


def run(
    its: Training,
    common: Common,
    layers: Annotated[int, typer.Option("--layers", help="Of the student.")] = 4,
    init: Annotated[
        str, typer.Option("--init", help="scratch, or the target's layers: first, last or even (spread).")
    ] = "even",
    loss: Annotated[
        str, typer.Option("--loss", help="kl (forward), reverse, tv (1 - acceptance), lk or hybrid.")
    ] = "kl",
    frozen: Annotated[
        bool, typer.Option("--frozen/--free", help="Embedding and head stay the target's, or learn, too.")
    ] = True,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="The loss looks at all tokens, not at --draft-vocab of them.")
    ] = False,
    on_policy: Annotated[
        float, typer.Option("--on-policy", help="Share of answers that go on in the student's own words.")
    ] = 0.0,
    on_policy_tokens: Annotated[int, typer.Option("--on-policy-tokens", help="How many of these.")] = 32,
    depth: Annotated[int, typer.Option("--depth", help="Tokens of a simulated chain.")] = 4,
) -> int:
    """Distil the target into a small decoder, which drafts as --drafter model:OUT."""
    from outpace.training.distil import StudentShape, open_run
    from outpace.training.objectives.distil import DistilOptions

    options = DistilOptions(loss, on_policy, on_policy_tokens, depth)
    given: Any = init  # checked by StudentShape
    shape = StudentShape(layers, given, frozen, all_tokens)
    return train(common, its, open_run(its.job(), shape, options))
