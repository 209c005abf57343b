"""``outpace train parallel``: a drafter that says a block of tokens in one forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from outpace.cli.command import Command, option
from outpace.cli.options import Common
from outpace.cli.train.training import Training, train

if TYPE_CHECKING:
    from outpace.training.loop import Loop

_COST = 0.1  # of a plain step: what a token more to verify is taken to cost where the confidence cuts drafts


def run(
    its: Training,
    common: Common,
    block: Annotated[int, option("--block", help="Tokens a draft.")] = 7,
    layers: Annotated[int, option("--layers", help="Of the network.")] = 2,
    rank: Annotated[int, option("--markov-rank", help="Of what the token before adds; 0: nothing.")] = 64,
    mask_token: Annotated[
        int | None, option("--mask-token", help="Stands where nothing is known. Default: what is said least.")
    ] = None,
    anchors: Annotated[float, option("--anchors", help="Blocks for each token that counts.")] = 0.25,
    candidates: Annotated[
        int, option("--candidates", help="Rows of the head a batch is trained against. 0: all.")
    ] = 2048,
    slope: Annotated[float, option("--slope", help="Token k of a block weighs e^(-k / SLOPE).")] = 4.0,
    cross_entropy: Annotated[float, option("--cross-entropy", help="Its weight.")] = 0.1,
    l1: Annotated[float, option("--l1", help="Weight of the L1 distance from the target.")] = 0.9,
    length: Annotated[float, option("--length", help="Weight of the expected accepted length.")] = 0.0,
    confidence: Annotated[float, option("--confidence", help="Weight of the confidence head's loss.")] = 1.0,
    confidence_of: Annotated[
        str, option("--confidence-of", help="agreement (of greedy decoding) or overlap (of sampling).")
    ] = "agreement",
) -> int:
    """Train two decoder layers that draft a block at once (DSpark)."""
    from outpace.training.objectives.parallel import ParallelOptions
    from outpace.training.parallel import ParallelShape, open_run

    options = ParallelOptions(anchors, candidates, slope, cross_entropy, l1, length, confidence, confidence_of)
    shape = ParallelShape(block, layers, rank, mask_token)
    return train(common, its, open_run(its.job(), shape, options), _prefixes)


def _prefixes(loop: Loop) -> dict[str, Any]:
    from outpace.training.parallel import simulate_prefixes

    found, drafted = simulate_prefixes(loop, _COST)
    return {"cut_tokens_per_step": found.tokens_per_step, "cut_drafted": drafted}


COMMAND = Command("parallel", run, "outpace train parallel --data answers --out drafter --epochs 4")
