"""What followed, wherever the end of a sequence appeared before: the index and the best-first tree of ``suffix``.

The reference for native/drafting/suffix.h, which is used where it was built and gives the same numbers; the interface
is ``append`` and ``propose``. Instead of a suffix tree with counts, which has to update every ancestor for every token,
positions are chained by the pair of tokens that ends there, and the counts of SuffixDecoding's tree (arXiv
2411.04975, section 3) are taken lazily: a tree node is the set of earlier places that its path continues, and its
children are what stands next in them. Only nodes that are drafted are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outpace.drafters.lookup.votes import END, Place, grow
from outpace.exact.tree import Tree

NEAREST = 32  # newest places looked at for the last pair of tokens
FEW = 8  # with fewer than that, also so many newest places of the last token alone
PLACE_BYTES = 400  # what a token takes at most, with its share of the tables

# Each place where the context appeared votes with the odds that one place with a match of that length (0 to 12 and
# more tokens) is right, measured on outputs of the demo model (docs/notebook.md); DOUBT is "something else".
WEIGHTS = (0.0, 0.25, 1.0, 1.4, 2.2, 2.4, 2.8, 3.5, 4.0, 5.0, 5.0, 6.0, 19.0)
DOUBT = 1.0


class SuffixIndex:
    """Places of sequences by what ends there. Amortised O(1) an appended token; at most ``capacity`` tokens.

    When it is full, the older half is forgotten.
    """

    def __init__(self, capacity: int, most: int = 16) -> None:
        if capacity < 2 or most < 2:
            raise ValueError(f"capacity={capacity} and most={most} must be at least 2")
        self.capacity, self.most = capacity, most
        self.tokens: list[int] = []
        self._pairs: dict[int, list[int]] = {}  # last two tokens -> where what follows them stands, oldest first
        self._singles: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Add committed tokens at the end."""
        held, pairs, singles = self.tokens, self._pairs, self._singles
        before = held[-1] if held else END
        for token in tokens:
            if len(held) >= self.capacity:
                self.shrink(self.capacity // 2)
                held, pairs, singles = self.tokens, self._pairs, self._singles
            held.append(token)
            if token != END:
                _push(singles, token, len(held), FEW)
                if before != END:
                    _push(pairs, before << 32 | token, len(held), NEAREST)
            before = token

    def shrink(self, n: int) -> None:
        """Forget all but the newest ``n`` tokens."""
        kept = self.tokens[max(0, len(self.tokens) - n) :] if n > 0 else []
        self.tokens, self._pairs, self._singles = [], {}, {}
        self.append(kept)

    def places(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """(index of what follows, length of the match) of the places that end like ``context``, newest first.

        The last ``most`` tokens of the context count. Only the ``NEAREST`` newest places of its last pair are
        looked at, then, when these are fewer than ``FEW``, the ``FEW`` newest of its last token; the context itself
        is one of both.
        """
        held, end, found = self.tokens, len(self.tokens), []
        n = min(len(context), self.most)
        if not n:
            return []
        last = context[-1]
        if n > 1:
            for at in reversed(self._pairs.get(context[-2] << 32 | last, ())[-NEAREST:]):
                if at == end:
                    continue
                length, stop = 2, min(n, at)
                while length < stop and held[at - 1 - length] == context[-1 - length]:
                    length += 1
                found.append((at, length))
        if len(found) < FEW:
            known = {at for at, _ in found}
            found.extend(
                (at, 1) for at in reversed(self._singles.get(last, ())[-FEW:]) if at != end and at not in known
            )
        return found

    def propose(
        self, context: Sequence[int], budget: int, others: Sequence[SuffixIndex] = (), wide: bool = True
    ) -> Tree:
        """At most ``budget`` nodes that may follow ``context`` (which this index ends with), best first.

        ``others``: indexes of other sequences that vote too. ``wide=False``: only the likeliest path.
        """
        places: list[Place] = [
            (index.tokens, at, length) for index in (self, *others) for at, length in index.places(context)
        ]
        return grow(places, WEIGHTS, DOUBT, budget, wide=wide, own=self.tokens)


def _push(table: dict[int, list[int]], key: int, at: int, most: int) -> None:
    places = table.get(key)
    if places is None:
        table[key] = [at]
    else:
        places.append(at)
        if len(places) > 2 * most:
            del places[: -most - 1]  # one to spare: the newest may be the context itself
