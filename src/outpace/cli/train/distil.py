"""``outpace train distil``: a small model that says what the target would."""

from __future__ import annotations

from typing import Annotated, Any

from outpace.cli.command import Command, option
from outpace.cli.options import Common
from outpace.cli.train.training import Training, train


def run(
    its: Training,
    common: Common,
    layers: Annotated[int, option("--layers", help="Of the student.")] = 4,
    init: Annotated[
        str, option("--init", help="scratch, or the target's layers: first, last or even (spread).")
    ] = "even",
    loss: Annotated[str, option("--loss", help="kl (forward), reverse, tv (1 - acceptance), lk or hybrid.")] = "kl",
    free: Annotated[bool, option("--free", help="Embedding and head learn, too; else they stay the target's.")] = False,
    all_tokens: Annotated[
        bool, option("--all-tokens", help="The loss looks at all tokens, not at --draft-vocab of them.")
    ] = False,
    on_policy: Annotated[
        float, option("--on-policy", help="Share of answers that go on in the student's own words.")
    ] = 0.0,
    on_policy_tokens: Annotated[int, option("--on-policy-tokens", help="How many of these.")] = 32,
    depth: Annotated[int, option("--depth", help="Tokens of a simulated chain.")] = 4,
) -> int:
    """Distil the target into a small decoder, which drafts as --drafter model:OUT."""
    from outpace.training.distil import StudentShape, open_run
    from outpace.training.objectives.distil import DistilOptions

    options = DistilOptions(loss, on_policy, on_policy_tokens, depth)
    given: Any = init  # checked by StudentShape
    shape = StudentShape(layers, given, not free, all_tokens)
    return train(common, its, open_run(its.job(), shape, options))


COMMAND = Command("distil", run, "outpace train distil --data answers --out student --epochs 4")
