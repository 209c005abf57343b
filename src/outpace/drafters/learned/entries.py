"""Real entries of rows that EAGLE's network has, and those that it has still to read.

Entry i of a row has the target's hidden states of position i and the token that follows it, i + 1.
``_native.EagleRows`` has the same methods for networks on the native runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.common.arrays import I32

_NONE = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Row:
    spans: list[tuple[int, int]] = field(default_factory=list)  # entries that the network has, [first, end), ascending
    at: I32 = field(default_factory=_NONE.copy)  # [n] those that it lacks, ascending
    tokens: I32 = field(default_factory=_NONE.copy)  # [n] theirs
    states: Any = None  # [n, T, h] theirs
    last: tuple[int, I32, Any] | None = None  # the last one that it has (entry, token [1], states [1, T, h]): see below


class Entries:
    """Entries by row. All but ``append``, ``retire`` and ``release`` raise KeyError for rows that are not there.

    Hidden states stay arrays of the backend's: numpy, or torch tensors on their device.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def rows(self) -> list[int]:
        """Those that are there."""
        return list(self._rows)

    def append(self, row: int, first: int, tokens: I32, states: Any) -> None:
        """Entries ``first`` ..: ``tokens`` int32 [n] and ``states`` [m, T, h], as many as both have. What is known
        already is left out; the row is made where it is not there."""
        known = self._rows.setdefault(row, _Row())
        begin, end = max(self.end(row) - first, 0), min(len(states), len(tokens))
        if begin < end:
            known.states = _joined(known.states, states[begin:end]) if len(known.at) else states[begin:end]
            known.at = np.concatenate([known.at, np.arange(first + begin, first + end, dtype=np.int32)])
            known.tokens = np.concatenate([known.tokens, tokens[begin:end]])

    def end(self, row: int) -> int:
        """The entry after all that are known."""
        known = self._rows[row]
        return int(known.at[-1]) + 1 if len(known.at) else known.spans[-1][1] if known.spans else 0

    def read(self, row: int) -> int:
        """How many the network has."""
        return sum(end - first for first, end in self._rows[row].spans)

    def waiting(self, row: int) -> int:
        """How many it has still to read."""
        return len(self._rows[row].at)

    def unread(self, row: int, n: int) -> tuple[I32, Any]:
        """The first n of those, which stay unread: tokens int32 [n] and states [n, T, h]."""
        return self._rows[row].tokens[:n], self._rows[row].states[:n]

    def has_read(self, row: int, n: int) -> None:
        """The network has the first n of those now."""
        known = self._rows[row]
        if not n:
            return
        for entry in known.at[:n].tolist():
            if known.spans and known.spans[-1][1] == entry:
                known.spans[-1] = (known.spans[-1][0], entry + 1)
            else:
                known.spans.append((entry, entry + 1))
        known.last = int(known.at[n - 1]), known.tokens[n - 1 : n], known.states[n - 1 : n]
        known.at, known.tokens, known.states = known.at[n:], known.tokens[n:], known.states[n:]

    def unread_last(self, row: int) -> bool:
        """Make the last entry that the network has unread again, to be fed where nothing else is; whether that can be
        done. Nothing is unread before."""
        known = self._rows[row]
        if known.last is None or not known.spans or known.spans[-1][1] != known.last[0] + 1:
            return False
        first, end = known.spans.pop()
        if end - 1 > first:
            known.spans.append((first, end - 1))
        entry, known.tokens, known.states = known.last
        known.at = np.array([entry], np.int32)
        return True

    def fork(self, src: int, dst: int, before: int) -> None:
        """``dst`` becomes what ``src`` has of the entries before ``before``."""
        known = self._rows[src]
        spans = [(first, min(end, before)) for first, end in known.spans if first < before]
        n = int(np.searchsorted(known.at, before))
        states = None if known.states is None else known.states[:n]
        self._rows[dst] = _Row(spans, known.at[:n], known.tokens[:n], states, known.last)

    def retire(self, row: int) -> None:
        """The last entry need not be kept."""
        if row in self._rows:
            self._rows[row].last = None

    def release(self, row: int) -> None:
        """Forget the row, if it is there."""
        self._rows.pop(row, None)


def _joined(first: Any, then: Any) -> Any:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, then])
    import torch

    return torch.cat([first, then])
