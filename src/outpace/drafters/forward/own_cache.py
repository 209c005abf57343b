"""A draft model's KV cache, in step with the target's rows.

What the draft model's cache holds is compared with what it should hold before every draft, so it is in step after any
verdict, including full acceptance, whoever drafted the tokens, and after a call that was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.common.arrays import I32, common_prefix
from outpace.models.base import Batch, Model, Output

CATCH_UP = 512  # tokens of one row that are caught up with in one forward


@dataclass(slots=True)
class Counterpart:
    """A target row's row in the draft model's cache, and the tokens that were fed there, one a position."""

    row: int
    fed: I32 = field(default_factory=lambda: np.zeros(64, np.int32))  # its first ``count`` entries
    count: int = 0

    def note(self, start: int, tokens: I32) -> None:
        """``tokens`` int32 [n] stand at positions ``start`` and on, and nothing behind them."""
        end = start + len(tokens)
        if end > len(self.fed):
            self.fed = np.concatenate([self.fed, np.zeros(end, np.int32)])
        self.fed[start:end] = tokens
        self.count = end


class OwnCache:
    """Rows of ``model``, named by the target's rows and made when they are first used. Token ids are the draft model's.

    The model is this cache's alone: rows that are nobody's, left by an interrupted call, are freed.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._rows: dict[int, Counterpart] = {}

    def begin(self, row: int, tokens: I32) -> I32:
        """Roll the row back to what it has in common with ``tokens`` int32 [n >= 1]; those that its KV lacks, at least
        the last one."""
        self._ensure(row)
        known = min(self._known(row, tokens), len(tokens) - 1)
        self.truncate(row, known)
        return np.array(tokens[known:], np.int32)

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n positions of the row."""
        there = self._rows[row]
        self.model.kv.truncate(there.row, n)
        there.count = n

    def feed(self, rows: Sequence[int], tokens: Sequence[I32]) -> tuple[Output, I32]:
        """Run new tokens of some rows, each at least one; the output, and the packed index of each row's last token.

        Raises MemoryLimitError, and what the model raises; then every row is as it was.
        """
        before = {row: self._rows[row].count for row in rows}
        left = list(tokens)
        try:
            while any(len(its) > CATCH_UP for its in left):
                long = [i for i, its in enumerate(left) if len(its) > CATCH_UP]
                self._forward([rows[i] for i in long], [left[i][:CATCH_UP] for i in long], wanted=False)
                for i in long:
                    left[i] = left[i][CATCH_UP:]
            output, batch = self._forward(rows, left, wanted=True)
        except BaseException:
            for row, count in before.items():
                self.truncate(row, count)
            raise
        return output, batch.starts[1:] - 1

    def _forward(
        self, rows: Sequence[int], tokens: Sequence[I32], *, wanted: bool, **inputs: Any
    ) -> tuple[Output, Batch]:
        """One forward; ``inputs`` go to ``Batch.pack``."""
        states = [self._rows[row] for row in rows]
        starts = [state.count for state in states]
        batch = Batch.pack(
            [state.row for state in states], tokens, starts, [wanted] * len(rows), last_only=True, **inputs
        )
        output = self.model.forward(batch)
        for state, start, its in zip(states, starts, tokens, strict=True):
            state.note(start, its)
        return output, batch

    def length(self, row: int) -> int:
        """Positions of the row that are known to be right; 0 for a row that is not there."""
        there = self._rows.get(row)
        return 0 if there is None else min(there.count, self.model.kv.length(there.row))

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many positions; it may not be there yet."""
        positions = min(positions, self.model.info.max_length)
        there = self._rows.get(row)
        if there is None or there.row not in self.model.kv.rows:
            return self.model.kv.bytes_for(positions)
        return self.model.kv.growth(there.row, max(0, positions - self.model.kv.length(there.row)))

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def fork(self, src: int, dst: int, n: int) -> None:
        """``dst`` starts with what is known of the first n positions of ``src``; nothing where ``src`` is unknown."""
        self.release(dst)
        if src in self._rows:
            n = min(n, self.length(src))
            self._ensure(dst)
            source, target = self._rows[src], self._rows[dst]
            self.model.kv.fork(source.row, target.row, n)
            target.note(0, source.fed[:n])

    def release(self, row: int) -> None:
        """Forget the row, if it is known."""
        self._rows.pop(row, None)
        self._settle()

    def _ensure(self, row: int) -> None:
        """Make the row if it is not there."""
        self._settle()
        if row not in self._rows:
            self._rows[row] = Counterpart(self.model.kv.alloc())

    def _known(self, row: int, tokens: I32) -> int:
        """How many of ``tokens`` the row's KV has."""
        return common_prefix(self._rows[row].fed[: self.length(row)], tokens)

    def _settle(self) -> None:
        """Free rows that are nobody's, and forget those that are gone: an interrupted call leaves such."""
        there, ours = set(self.model.kv.rows), {state.row for state in self._rows.values()}
        if there != ours:
            for gone in there - ours:
                self.model.kv.free(gone)
            for row in [row for row, state in self._rows.items() if state.row not in there]:
                del self._rows[row]

    @property
    def bytes(self) -> int:
        return self.model.kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        self._settle()
        for row, state in self._rows.items():
            assert state.count <= len(state.fed), f"row {row}: {state.count} of {len(state.fed)} tokens"
        self.model.kv.check()
