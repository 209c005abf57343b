"""``parallel:PATH``: a block of tokens from one small forward (DSpark, arXiv 2607.05147).

The block stands at the pending token and reads the target's hidden states of all positions before it, as keys and
values of its own that are computed once, when a position has become final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.config import ParallelConfig
from outpace.drafters.learned.drafter import Network
from outpace.errors import NotFiniteError

NEVER = -1e30  # the logit of a token that a slot does not choose among


class Block(NamedTuple):
    """A row's block under way: logits [K, D] without what the token before adds, and normed states [K, H] where that
    needs them, of which ``slot`` comes next; what its Markov head has left behind [rank]."""

    logits: F32
    slot: int = 0
    states: F32 | None = None
    left: F32 | None = None


def next_slots(given: Sequence[Any], first: Callable[[list[int]], Iterable[Block]]) -> tuple[F32, list[Any]]:
    """What comes next of blocks: logits [B, D], and the blocks one slot on. ``first`` computes those whose numbers it
    gets, which are not ``Block``s yet."""
    blocks = list(given)
    if new := [b for b, each in enumerate(given) if not isinstance(each, Block)]:
        for b, block in zip(new, first(new), strict=True):
            blocks[b] = block
    slots = np.stack([block.logits[block.slot] for block in blocks])
    return slots, [block._replace(slot=block.slot + 1) for block in blocks]


class BlockNetwork(Network):
    """The likeliest tree from one forward (DDTree, arXiv 2604.12989), or a chain, each slot of which knows the one
    before. ``confidence`` of a greedy row is the confidence head's or, without one, the network's own."""

    stepwise, eager = False, True
    most_levels: int

    def __init__(self, ids: I32, config: ParallelConfig) -> None:
        self.ids, self.max_length = ids, config.decoder.max_length
        self.most_levels, self.rank = config.block - (not config.sample_from_anchor), config.markov_rank

    def block(self, rows: Sequence[int], anchors: Sequence[int], positions: Sequence[int]) -> tuple[F32, F32]:
        """Normed states [B, K, H] and logits [B, K, D] of rows' blocks at pending tokens at ``positions``."""
        raise NotImplementedError

    def bias(self, tokens: Sequence[int], states: F32, left: F32) -> tuple[F32 | float, F32]:
        """What the tokens before add to the logits of slots with normed states [B, H], where the slots before have left
        [B, rank]: [B, D], or nothing; and what these leave."""
        raise NotImplementedError

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        before = [int(each[-1]) for each in tokens]

        def first(new: list[int]) -> list[Block]:
            states, logits = self.block(*([of[b] for b in new] for of in (rows, before, given)))
            none = np.zeros(self.rank, np.float32)
            return [Block(of_row, 0, normed, none) for of_row, normed in zip(logits, states, strict=True)]

        slots, blocks = next_slots(given, first)
        states = np.stack([block.states[block.slot - 1] for block in blocks])
        bias, left = self.bias(before, states, np.stack([block.left for block in blocks]))
        biased = np.asarray(slots + bias, np.float32)
        if not np.isfinite(biased).all():
            raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
        return biased, [block._replace(left=each) for block, each in zip(blocks, left, strict=True)]
