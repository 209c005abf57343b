"""The indexes of the rows that ``suffix`` drafts for, under one bound with its history.

The reference for native/drafting/lookups.h, which is used where it was built and gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outpace import _fast
from outpace.arrays import I32
from outpace.drafters.lookup.suffix_index import DOUBT, FEW, NEAREST, WEIGHTS, SuffixIndex

Found = tuple[list[int], list[int], list[float]]  # tokens, parents and gains of a tree


@dataclass(slots=True)
class _Row:
    index: SuffixIndex
    request: int
    prompt: int  # tokens of the sequence that are the prompt's
    known: int = 0  # committed tokens that the index has seen


class SuffixRows:
    """At most ``capacity`` tokens in all rows and ``history`` together. ``most``: longest match that counts; ``wide``:
    trees, not chains. Raises ValueError."""

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
        self._new()  # refuses what no row could have
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


_Rows = _fast.pick("SuffixRows", SuffixRows)


def new_rows(capacity: int, most: int, wide: bool, history: SuffixIndex | None) -> SuffixRows:
    """With the constants that were measured, in C++ where it was built."""
    rows: SuffixRows = _Rows(capacity, most, NEAREST, FEW, WEIGHTS, DOUBT, wide, history)
    return rows
