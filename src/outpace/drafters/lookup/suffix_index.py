"""What followed, wherever the end of a sequence appeared before: the index and the best-first tree of ``suffix``.

The reference for native/drafting/suffix.h, which is used where it was built and gives the same numbers. Instead of a
suffix tree with counts, which has to update every ancestor for every token, positions are chained by the pair of tokens
that ends there, and the counts of SuffixDecoding's tree (arXiv 2411.04975, section 3) are taken lazily: a tree node is
the set of earlier places that its path continues, and its children are what stands next in them. Only nodes that are
drafted are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from outpace import _fast
from outpace.arrays import I32
from outpace.drafters.lookup.votes import END, Place, grow

NEAREST = 32  # newest places looked at for the last pair of tokens
FEW = 8  # with fewer than that, also so many newest places of the last token alone
PLACE_BYTES = 400  # what a token takes at most, with its share of the tables

# Each place where the context appeared votes with the odds that one place with a match of that length (0 to 12 and
# more tokens) is right, measured on outputs of the demo model (docs/notebook.md); DOUBT is "something else".
WEIGHTS = (0.0, 0.25, 1.0, 1.4, 2.2, 2.4, 2.8, 3.5, 4.0, 5.0, 5.0, 6.0, 19.0)
DOUBT = 1.0


class SuffixIndex:
    """Places of sequences by what ends there. Amortised O(1) an appended token; at most ``capacity`` tokens.

    When it is full, the older half is forgotten. ``most``: tokens of a context that count. Raises ValueError.
    """

    def __init__(
        self, capacity: int, most: int, nearest: int, few: int, weights: Sequence[float], doubt: float
    ) -> None:
        if capacity < 2 or most < 2:
            raise ValueError(f"capacity={capacity} must be 2 to 2147483647 and most={most} at least 2")
        self.capacity, self.most, self.nearest, self.few = capacity, most, nearest, few
        self._weights, self._doubt = weights, doubt
        self._held: list[int] = []
        self._pairs: dict[int, list[int]] = {}  # last two tokens -> where what follows them stands, oldest first
        self._singles: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def tokens(self) -> I32:
        """What is kept int32 [n], oldest first."""
        return np.array(self._held, np.int32)

    def append(self, tokens: I32) -> None:
        """Add committed tokens int32 [n] at the end."""
        self._add(tokens.tolist())

    def _add(self, tokens: Iterable[int]) -> None:
        held, pairs, singles = self._held, self._pairs, self._singles
        before = held[-1] if held else END
        for token in tokens:
            if len(held) >= self.capacity:
                self.shrink(self.capacity // 2)
                held, pairs, singles = self._held, self._pairs, self._singles
            held.append(token)
            if token != END:
                _push(singles, token, len(held), self.few)
                if before != END:
                    _push(pairs, before << 32 | token, len(held), self.nearest)
            before = token

    def shrink(self, n: int) -> None:
        """Forget all but the newest ``n`` tokens."""
        kept = self._held[max(0, len(self._held) - n) :] if n > 0 else []
        self._held, self._pairs, self._singles = [], {}, {}
        self._add(kept)

    def places(self, context: I32) -> list[tuple[int, int]]:
        """(index of what follows, length of the match) of the places that end like ``context`` int32 [n], newest first.

        The last ``most`` tokens of the context count. Only the ``nearest`` newest places of its last pair are
        looked at, then, when these are fewer than ``few``, the ``few`` newest of its last token; the context itself
        is one of both.
        """
        wanted = context[-self.most :].tolist()
        held, end, found = self._held, len(self._held), []
        n = len(wanted)
        if not n:
            return []
        last = wanted[-1]
        if n > 1:
            for at in reversed(self._pairs.get(wanted[-2] << 32 | last, ())[-self.nearest :]):
                if at == end:
                    continue
                length, stop = 2, min(n, at)
                while length < stop and held[at - 1 - length] == wanted[-1 - length]:
                    length += 1
                found.append((at, length))
        if len(found) < self.few:
            known = {at for at, _ in found}
            single = reversed(self._singles.get(last, ())[-self.few :])
            found.extend((at, 1) for at in single if at != end and at not in known)
        return found

    def propose(
        self, context: I32, budget: int, others: Sequence[SuffixIndex], wide: bool
    ) -> tuple[list[int], list[int], list[float]]:
        """At most ``budget`` nodes that may follow ``context`` int32 [n] (which this index ends with), best first.

        ``others``: indexes of other sequences that vote too. ``wide=False``: only the likeliest path. A tree's tokens,
        parents and gains.
        """
        places: list[Place] = [
            (index._held, at, length) for index in (self, *others) for at, length in index.places(context)
        ]
        tree = grow(places, self._weights, self._doubt, budget, wide=wide, own=self._held)
        return tree.tokens, tree.parents, tree.gains


def _push(table: dict[int, list[int]], key: int, at: int, most: int) -> None:
    places = table.get(key)
    if places is None:
        table[key] = [at]
    else:
        places.append(at)
        if len(places) > 2 * most:
            del places[: -most - 1]  # one to spare: the newest may be the context itself


_Index = _fast.pick("SuffixIndex", SuffixIndex)


def new_index(capacity: int, most: int = 16) -> SuffixIndex:
    """An empty index with the constants above. Raises ValueError."""
    return _Index(capacity, most, NEAREST, FEW, WEIGHTS, DOUBT)
