"""``native/drafting/suffix.h`` and ``SuffixRows`` in plain Python: what the C++ is compared with, number for number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.common.arrays import I32
from outpace.drafters.lookup.datastore import END
from tests.oracles.votes import Place, grow


class SuffixIndex:
    """Places of sequences by what ends there. Amortised O(1) an appended token; at most ``capacity`` tokens.

    When it is full, the older half is forgotten. ``most``: tokens of a context that count.
    """

    def __init__(
        self, capacity: int, most: int, nearest: int, few: int, weights: Sequence[float], doubt: float
    ) -> None:
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


Found = tuple[list[int], list[int], list[float]]  # tokens, parents and gains of a tree


@dataclass(slots=True)
class _Row:
    index: SuffixIndex
    request: int
    prompt: int  # tokens of the sequence that are the prompt's
    known: int = 0  # committed tokens that the index has seen


class SuffixRows:
    """At most ``capacity`` tokens in all rows and ``history`` together. ``most``: longest match that counts; ``wide``:
    trees, not chains."""

    def __init__(
        self,
        capacity: int,
        most: int,
        nearest: int,
        few: int,
        weights: Sequence[float],
        doubt: float,
        wide: bool,
        history: SuffixIndex | None,
    ) -> None:
        self._capacity, self._most, self._wide, self._history = capacity, most, wide, history
        self._rules = (nearest, few, weights, doubt)
        self._rows: dict[int, _Row] = {}

    def tree(self, row: int, request: int, prompt: int, tokens: I32, size: int) -> Found:
        """What follows a row's committed ``tokens`` int32 [L], of which the first ``prompt`` are its prompt's.

        ``bound`` has to follow.
        """
        its = self._rows.get(row)
        if its is None or its.request != request:
            its = self._rows[row] = _Row(self._new(), request, prompt)
        if its.known < len(tokens):  # while a row is not asked to draft, it costs nothing
            its.index.append(tokens[its.known :])
            its.known = len(tokens)
        others = [self._history] if self._history is not None and len(self._history) else []
        return its.index.propose(tokens[-self._most :], size, others, self._wide)

    def bound(self) -> None:
        """Forget until everything fits: the history first, then the older half of the largest row."""
        while self.places > self._capacity:
            if self._history is not None and len(self._history):
                self._history.shrink(len(self._history) // 2)
            else:
                row = max(self._rows.values(), key=lambda r: len(r.index))
                row.index.shrink(len(row.index) // 2)

    @property
    def places(self) -> int:
        """Tokens indexed or kept now."""
        rows = sum(len(row.index) for row in self._rows.values())
        return rows + (len(self._history) if self._history is not None else 0)

    def release(self, row: int) -> int:
        """The row is gone; tokens of its prompt, or -1 if it was unknown."""
        gone = self._rows.pop(row, None)
        return -1 if gone is None else gone.prompt

    def rows(self) -> dict[int, tuple[int, int]]:
        """By row: tokens in its index, and committed tokens that it has seen."""
        return {row: (len(its.index), its.known) for row, its in self._rows.items()}

    def _new(self) -> SuffixIndex:
        return SuffixIndex(self._capacity, self._most, *self._rules)
