"""``outpace train medusa``: heads on the target's last hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.command import flatten
from outpace.cli.options import Common
from outpace.cli.train.training import Training, train

if TYPE_CHECKING:
    from outpace.training.loop import Loop


def register(app: typer.Typer) -> None:
    app.command("medusa", epilog="Example: outpace train medusa --data answers --out drafter --epochs 4")(flatten(run))


def run(
    its: Training,
    common: Common,
    heads: Annotated[int, typer.Option("--heads", help="Tokens ahead.")] = 4,
    layers: Annotated[int, typer.Option("--layers", help="Residual blocks of a head.")] = 1,
    decay: Annotated[float, typer.Option("--decay", help="Head k weighs DECAY^k.")] = 0.8,
    candidates: Annotated[
        int, typer.Option("--candidates", help="Rows of the head a batch is trained against. 0: all.")
    ] = 2048,
    nodes: Annotated[int, typer.Option("--nodes", help="Of the tree that is searched.")] = 32,
    ranks: Annotated[int, typer.Option("--ranks", help="Candidates of a head.")] = 10,
) -> int:
    """Train heads that each say a token further ahead (Medusa-1), and search the tree of their candidates."""
    from outpace.training.medusa import MedusaShape, open_run
    from outpace.training.objectives.medusa import MedusaOptions

    options, shape = MedusaOptions(decay, candidates, nodes, ranks), MedusaShape(heads, layers)
    return train(common, its, open_run(its.job(), shape, options), _planted)


def _planted(loop: Loop) -> dict[str, Any]:
    from outpace.training.medusa import plant

    return {"tree_tokens_per_step": plant(loop).tokens_per_step}
