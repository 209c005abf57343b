"""Real entries of rows that a learned drafter's network has, and those that it has still to read.

Entry i of a row has the target's taps of position i and the token that follows it, i + 1. ``_native.EagleRows`` is the
same in C++, where whole steps draft from it; this is its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outpace.arrays import I32


class Entries(Protocol):
    """Entries by row. All but ``append`` and ``release`` raise KeyError for rows that are not there."""

    def __contains__(self, row: int) -> bool: ...

    def rows(self) -> list[int]:
        """Those that are there."""

    def append(self, row: int, first: int, tokens: I32, taps: Any) -> None:
        """Entries ``first`` ..: ``tokens`` int32 [n] and ``taps`` [m, T, H], as many as both have. What is known
        already is left out; the row is made where it is not there."""

    def end(self, row: int) -> int:
        """The entry after all that are known."""

    def read(self, row: int) -> int:
        """How many the network has."""

    def waiting(self, row: int) -> int:
        """How many it has still to read."""

    def unread(self, row: int, n: int) -> tuple[I32, Any]:
        """The first n of those, which stay unread: tokens int32 [n] and taps [n, T, H]."""

    def has_read(self, row: int, n: int) -> None:
        """The network has the first n of those now."""

    def unread_last(self, row: int) -> bool:
        """Make the last entry that the network has unread again; whether that can be done."""

    def fork(self, src: int, dst: int, known: int) -> None:
        """``dst`` becomes what ``src`` has of the entries before ``known``."""

    def retire(self, row: int) -> None:
        """The last entry need not be kept."""

    def release(self, row: int) -> None:
        """Forget the row, if it is there."""


@dataclass(slots=True)
class _Piece:
    """Entries ``start`` .. that follow one another: their tokens int32 [n] and taps [n, T, H]."""

    start: int
    tokens: I32
    taps: Any

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def part(self, first: int, last: int) -> _Piece:
        """Entries ``first`` to ``last - 1``, counted from its own first."""
        return _Piece(self.start + first, self.tokens[first:last], self.taps[first:last])


@dataclass(slots=True)
class _Row:
    spans: list[tuple[int, int]] = field(default_factory=list)  # entries that the network has, [first, end), ascending
    unread: list[_Piece] = field(default_factory=list)  # those that it lacks, ascending
    last: _Piece | None = None  # the last one that it has, to be fed again where nothing is unread


class HostEntries:
    """See ``Entries``. Taps stay arrays of the backend's: numpy, or torch tensors on their device."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def rows(self) -> list[int]:
        return list(self._rows)

    def append(self, row: int, first: int, tokens: I32, taps: Any) -> None:
        its = self._rows.setdefault(row, _Row())
        begin, end = max(self.end(row) - first, 0), min(len(taps), len(tokens))
        if begin < end:
            its.unread.append(_Piece(first + begin, np.array(tokens[begin:end], np.int32), taps[begin:end]))

    def end(self, row: int) -> int:
        its = self._rows[row]
        return its.unread[-1].end if its.unread else its.spans[-1][1] if its.spans else 0

    def read(self, row: int) -> int:
        return sum(end - first for first, end in self._rows[row].spans)

    def waiting(self, row: int) -> int:
        return sum(len(piece.tokens) for piece in self._rows[row].unread)

    def _first(self, row: int, n: int) -> list[_Piece]:
        taken: list[_Piece] = []
        for piece in self._rows[row].unread:
            if n <= 0:
                break
            taken.append(piece.part(0, min(n, len(piece.tokens))))
            n -= len(piece.tokens)
        return taken

    def unread(self, row: int, n: int) -> tuple[I32, Any]:
        return _together(self._first(row, n))

    def has_read(self, row: int, n: int) -> None:
        its, pieces = self._rows[row], self._first(row, n)
        for piece in pieces:
            if its.spans and its.spans[-1][1] == piece.start:
                its.spans[-1] = (its.spans[-1][0], piece.end)
            else:
                its.spans.append((piece.start, piece.end))
            first, count = its.unread[0], len(piece.tokens)
            its.unread[:1] = [first.part(count, len(first.tokens))] if count < len(first.tokens) else []
        if pieces:
            its.last = pieces[-1].part(len(pieces[-1].tokens) - 1, len(pieces[-1].tokens))

    def unread_last(self, row: int) -> bool:
        its = self._rows[row]
        if its.last is None or not its.spans or its.spans[-1][1] != its.last.end:
            return False
        first, end = its.spans[-1]
        its.spans[-1:] = [(first, end - 1)] if end - 1 > first else []
        its.unread.insert(0, its.last)
        return True

    def fork(self, src: int, dst: int, known: int) -> None:
        source = self._rows[src]
        spans = [(first, min(end, known)) for first, end in source.spans if first < known]
        unread = [p.part(0, min(len(p.tokens), known - p.start)) for p in source.unread if p.start < known]
        self._rows[dst] = _Row(spans, unread, source.last)

    def retire(self, row: int) -> None:
        if row in self._rows:
            self._rows[row].last = None

    def release(self, row: int) -> None:
        self._rows.pop(row, None)


def _together(pieces: Sequence[_Piece]) -> tuple[I32, Any]:
    """Entries of several pieces as if they stood side by side."""
    if len(pieces) == 1:
        return pieces[0].tokens, pieces[0].taps
    taps = [piece.taps for piece in pieces]
    if isinstance(taps[0], np.ndarray):
        joined = np.concatenate(taps)
    else:
        import torch

        joined = torch.cat(taps)
    return np.concatenate([piece.tokens for piece in pieces]), joined
