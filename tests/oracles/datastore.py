"""``native/drafting/datastore.h`` in plain Python: a search of the arrays that drafters/lookup/datastore.py writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from outpace.common.arrays import I32
from outpace.drafters.lookup.datastore import DEPTH, END, MOST_TOKENS
from outpace.drafters.lookup.segment_files import I64, Arrays
from tests.oracles.votes import grow

_BITS, _KEYED = 21, 3  # of a token in a key; tokens in a key


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere in a datastore that a context ends like: what followed there, and how long the match is."""

    following: list[int]
    length: int


class Search:
    """What followed in the segments of a datastore. Each place votes with ``weights[length of its match]``; ``doubt``
    is the weight of "something else". ``vocab``: tokens that may be proposed are below."""

    def __init__(self, segments: Sequence[Arrays], weights: Sequence[float], doubt: float, vocab: int) -> None:
        self._segments = [_Segment(*arrays, vocab) for arrays in segments]
        self._weights, self._doubt = weights, doubt

    def places(self, context: Sequence[int], count: int, follow: int) -> list[Place]:
        """At most ``count`` places that end like ``context``, longest matches first, and ``follow`` tokens of each."""
        found = [place for segment in self._segments for place in segment.places(context, count, follow)]
        found.sort(key=lambda place: -place.length)
        return found[:count]

    def propose(self, context: I32, places: int, least: int, budget: int) -> tuple[list[int], list[int], list[float]]:
        """tokens, parents and gains of the tree that follows ``context`` int32 [n], by the votes of at most ``places``
        places whose match has at least ``least`` tokens."""
        found = [p for p in self.places(context.tolist(), places, budget) if p.length >= least]
        tree = grow([(p.following, 0, p.length) for p in found], self._weights, self._doubt, budget)
        return tree.tokens, tree.parents, tree.gains


@dataclass(frozen=True, slots=True)
class _Segment:
    tokens: I32
    order: I32
    keys: I64
    vocab: int

    def places(self, context: Sequence[int], count: int, follow: int) -> list[Place]:
        # No key has what does not fit it, so that nothing ends like more than what stands before that.
        backwards = list(takewhile(lambda token: 0 <= token < MOST_TOKENS, context[: -DEPTH - 1 : -1]))
        at = 0
        for n in range(min(len(backwards), _KEYED), 0, -1):
            low, high = _key_range(backwards[:n])
            begin, end = np.searchsorted(self.keys, (low, high)).tolist()
            if begin < end:
                at = self._insertion(backwards, begin, end) if n == _KEYED else (begin + end) // 2
                break
        else:
            return []
        # The nearest neighbours on both sides are the longest matches.
        near = self.order[max(begin, at - count) : min(end, at + count)]
        near = near[(near >= 0) & (near < len(self.tokens))]
        back = np.arange(1, len(backwards) + 1, dtype=np.int32)
        before = near[:, None] - back
        same = (self.tokens[np.maximum(before, 0)] == backwards) & (before >= 0)
        lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        best = np.argsort(-lengths, kind="stable")[:count]
        after = near[best, None].astype(np.int64) + np.arange(follow)
        following = self.tokens[np.minimum(after, len(self.tokens) - 1)]
        following[(after >= len(self.tokens)) | (following < 0) | (following >= self.vocab)] = END
        return [
            Place(tokens[: tokens.index(END)] if END in tokens else tokens, length)
            for tokens, length in zip(following.tolist(), lengths[best].tolist(), strict=True)
        ]

    def _insertion(self, backwards: list[int], begin: int, end: int) -> int:
        """Where the context would stand among places [begin, end), which agree with its last _KEYED tokens."""
        rest = backwards[_KEYED:]
        while begin < end:
            middle = (begin + end) // 2
            if self._before(int(self.order[middle]))[_KEYED:] < rest:
                begin = middle + 1
            else:
                end = middle
        return begin

    def _before(self, position: int) -> list[int]:
        """Up to DEPTH tokens before a position, backwards."""
        position = min(max(position, 0), len(self.tokens))
        before: list[int] = self.tokens[max(position - DEPTH, 0) : position][::-1].tolist()
        return before


def _key_range(backwards: Sequence[int]) -> tuple[int, int]:
    """Keys [low, high) of the places that end like a context of 1 to _KEYED tokens."""
    key = 0
    for token in backwards:
        key = key << _BITS | (token + 1)
    left = _BITS * (_KEYED - len(backwards))
    return key << left, (key + 1) << left
