"""``ngram``: what followed the last time the same few tokens appeared, in the prompt or the output (prompt lookup).

Stateless: the row's tokens are the index, so nothing has to be rolled back, forked or freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.drafters.base import Drafter, RowView
from outpace.errors import DrafterError
from outpace.types import I32, Drafts


class NgramDrafter(Drafter):
    """Longest match of the sequence's end, ``least`` to ``most`` tokens long; among equally long ones the newest."""

    name = "ngram"

    def __init__(self, least: int = 1, most: int = 8) -> None:
        if not 1 <= least <= most <= 64:
            raise DrafterError(f"ngram: min={least},max={most} is out of range: give 1 <= min <= max <= 64")
        self._least, self._most = least, most

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        proposals = [
            lookup(row.tokens, int(size), self._least, self._most) for row, size in zip(rows, sizes, strict=True)
        ]
        return Drafts.chains(proposals, self.name)


def lookup(tokens: I32, size: int, least: int, most: int) -> I32:
    """At most ``size`` tokens int32 that followed the newest longest match of the end of ``tokens`` int32 [L].

    A match that runs into the end itself is a loop: it is unrolled, since the likeliest next turn is another one.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # where a match of length 1 ends
    best, n = (ends, 1) if least == 1 else (ends[:0], 1)
    while len(ends) and n < min(most, last):
        ends = ends[ends >= n]
        ends = ends[tokens[ends - n] == tokens[last - n]]
        n += 1
        if len(ends) and n >= least:
            best = ends
    if not len(best):
        return np.zeros(0, np.int32)
    start = int(best[-1]) + 1
    period = len(tokens) - start
    return tokens[start + np.arange(size) % period]
