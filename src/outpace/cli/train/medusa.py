"""``outpace train medusa``: heads on the target's last hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command, option
from outpace.cli.options import Common
from outpace.cli.train.training import Training, train

if TYPE_CHECKING:
    from outpace.training.loop import Loop


def run(
    its: Training,
    common: Common,
    heads: Annotated[int, option("--heads", help="Tokens ahead.")] = 4,
    layers: Annotated[int, option("--layers", help="Residual blocks of a head.")] = 1,
    decay: Annotated[float, option("--decay", help="Head k weighs DECAY^k.")] = 0.8,
    candidates: Annotated[
        int, option("--candidates", help="Rows of the head a batch is trained against. 0: all.")
    ] = 2048,
    nodes: Annotated[int, option("--nodes", help="Of the tree that is searched.")] = 32,
    ranks: Annotated[int, option("--ranks", help="Candidates of a head.")] = 10,
) -> int:
    """Train heads that each say a token further ahead (Medusa-1), and search the tree of their candidates."""
    from outpace.training.medusa import MedusaShape, open_run
    from outpace.training.objectives.medusa import MedusaOptions

    options, shape = MedusaOptions(decay, candidates, nodes, ranks), MedusaShape(heads, layers)
    return train(common, its, open_run(its.job(), shape, options), _planted)


def _planted(loop: Loop) -> dict[str, Any]:
    from outpace.training.medusa import plant

    return {"tree_tokens_per_step": plant(loop).tokens_per_step}


COMMAND = Command("medusa", run, "outpace train medusa --data answers --out drafter --epochs 4")
