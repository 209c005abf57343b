"""``parallel:PATH``: a block of tokens from one small forward (DSpark, arXiv 2607.05147).

The block stands at the pending token and reads the target's hidden states of all positions before it, as keys and
values of its own that are computed once, when a position has become final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.drafter import Network
from outpace.drafters.learned.layouts import ParallelConfig
from outpace.errors import NotFiniteError


class Block(NamedTuple):
    """A row's block under way: logits [K, D] without what the token before adds, of which ``slot`` comes next."""

    logits: F32
    slot: int


def next_slots(given: Sequence[Any], first: Callable[[list[int]], Iterable[F32]]) -> tuple[F32, list[Any]]:
    """What comes next of blocks: logits [B, D], and the blocks one slot on. ``first`` computes the logits [K, D] of
    those whose numbers it gets, which are not ``Block``s yet."""
    blocks = list(given)
    if new := [b for b, each in enumerate(given) if not isinstance(each, Block)]:
        for b, logits in zip(new, first(new), strict=True):
            blocks[b] = Block(logits, 0)
    slots = np.stack([block.logits[block.slot] for block in blocks])
    return slots, [block._replace(slot=block.slot + 1) for block in blocks]


class BlockNetwork(Network):
    """A chain from one forward, each slot of which knows the one before. ``confidence`` of a greedy row is the
    confidence head's or, without one, the network's own."""

    stepwise, eager = False, True
    most_levels: int

    def __init__(self, ids: I32, config: ParallelConfig) -> None:
        self.ids, self.max_length = ids, config.decoder.max_length
        self.most_levels = config.block - (not config.sample_from_anchor)

    def block(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> F32:
        """Logits [B, K, D] of rows' blocks at pending tokens that stand at ``positions``."""
        raise NotImplementedError

    def bias(self, tokens: Sequence[int]) -> F32 | float:
        """What the tokens before add to the next slots' logits: [B, D], or nothing."""
        raise NotImplementedError

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        before = [int(each[-1]) for each in tokens]
        slots, blocks = next_slots(
            given, lambda new: self.block(*([of[b] for b in new] for of in (rows, before, given)))
        )
        biased = np.asarray(slots + self.bias(before), np.float32)
        if not np.isfinite(biased).all():
            raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
        return biased, blocks
