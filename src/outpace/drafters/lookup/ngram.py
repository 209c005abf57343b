"""``ngram``: what followed the last time the same few tokens appeared, in the prompt or the output (prompt lookup).

Stateless: the row's tokens are the index, so nothing has to be rolled back, forked or freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace import _fast
from outpace.arrays import I32
from outpace.drafters.base import RowView, TreeDrafter
from outpace.errors import DrafterError
from outpace.exact.tree import Lists, Tree, merge

# How often the token after a match of 0, 1, 2, ... tokens was right on outputs of the demo model (docs/notebook.md).
HIT = (0.0, 0.21, 0.52, 0.6, 0.7, 0.71, 0.74, 0.78, 0.8, 0.84, 0.84, 0.85, 0.95)
OLDER = 0.4  # the share of what the newer matches leave that the next older one gets


class NgramDrafter(TreeDrafter):
    """Longest match of the sequence's end, ``least`` to ``most`` tokens long; among equally long ones the newest.

    With ``candidates`` > 1 that many matches are looked at, longer before shorter and newer before older, and merged
    into one tree. Raises DrafterError.
    """

    name = "ngram"

    def __init__(self, least: int = 1, most: int = 8, candidates: int = 1) -> None:
        if not 1 <= least <= most <= 64:
            raise DrafterError(f"ngram: min={least},max={most} is out of range: give 1 <= min <= max <= 64")
        if not 1 <= candidates <= 64:
            raise DrafterError(f"ngram: candidates={candidates} is out of range: give 1 (a chain) to 64")
        self._least, self._most, self._candidates = least, most, candidates
        if type(self) is NgramDrafter and candidates == 1 and _fast.native is not None:
            self.lookup, self.names = _fast.native.NgramLookup(least, most, HIT), (self.name,)

    def trees(self, rows: Sequence[RowView], sizes: Sequence[int]) -> list[Tree]:
        return [self._tree(row.tokens, size) for row, size in zip(rows, sizes, strict=True)]

    def _tree(self, tokens: I32, size: int) -> Tree:
        if self._candidates == 1:
            return self._chain(tokens, size)
        left, chains = 1.0, []
        for start, length in matches(tokens, self._least, self._most, self._candidates):
            hits = [left * HIT[min(length, len(HIT) - 1)]]
            hits.extend(HIT[min(length + i, len(HIT) - 1)] for i in range(1, size))
            chains.append(Tree.chain(_following(tokens, start, size).tolist(), np.cumprod(hits).tolist()))
            left *= OLDER
        return merge(chains, size)

    def _chain(self, tokens: I32, size: int) -> Tree:
        """The one best match, without the detours of several: this runs between two forwards."""
        return Tree(*_newest_chain(tokens, self._least, self._most, size, HIT))


def newest(tokens: I32, least: int, most: int) -> tuple[int, int] | None:
    """(index of what follows, length) of the newest of the longest matches of the end of ``tokens`` int32 [L]."""
    data = np.ascontiguousarray(tokens).tobytes()
    for n in range(min(most, len(tokens) - 1), least - 1, -1):
        end = data[-4 * n :]
        at = data.rfind(end, 0, len(data) - 4)
        while at % 4 and at >= 0:  # between two tokens
            at = data.rfind(end, 0, at + 4 * n - 1)
        if at >= 0:
            return at // 4 + n, n
    return None


def newest_chain(tokens: I32, least: int, most: int, size: int, hit: Sequence[float]) -> Lists:
    """What followed ``newest`` as a chain of ``size`` nodes, or none; ``hit``: chances by length of the match.

    The reference for native/drafting/lookup.h.
    """
    found = newest(tokens, least, most)
    if found is None:
        return [], [], [], []
    start, length = found
    following: list[int] = tokens[start : start + size].tolist()
    while len(following) < size:  # a loop: its next turn is another one
        following += following[: size - len(following)]
    gain, gains = 1.0, []
    for i in range(size):
        gain *= hit[min(length + i, len(hit) - 1)]
        gains.append(gain)
    chain = Tree.chain(following, gains)
    return chain.tokens, chain.parents, chain.gains, chain.sources


_newest_chain = _fast.pick("newest_chain", newest_chain)


def matches(tokens: I32, least: int, most: int, count: int) -> list[tuple[int, int]]:
    """(index of what follows, length) of at most ``count`` matches of the end of ``tokens`` int32 [L].

    Longer ones first, among equally long ones the newest first; a length counts up to ``most``.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # where a match of length 1 ends
    by_length = [(ends, 1)] if least == 1 else []
    n = 1
    while len(ends) and n < min(most, last):
        ends = ends[ends >= n]
        ends = ends[tokens[ends - n] == tokens[last - n]]
        n += 1
        if len(ends) and n >= least:
            by_length.append((ends, n))
    found: dict[int, int] = {}
    for ends, n in reversed(by_length):
        for end in ends[::-1][: count + len(found)].tolist():
            if len(found) == count:
                return [(end + 1, length) for end, length in found.items()]
            found.setdefault(end, n)
    return [(end + 1, length) for end, length in found.items()]


def _following(tokens: I32, start: int, size: int) -> I32:
    """``size`` tokens from ``start`` on. A match that runs into the end is a loop: it is unrolled, since the likeliest
    next turn is another one."""
    return tokens[start + np.arange(size) % (len(tokens) - start)]
