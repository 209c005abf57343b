"""A draft model's KV cache, in step with the target's rows, or with their ends.

What the draft model's cache holds is compared with what it should hold before every draft, so it is in step after any
verdict, including full acceptance, whoever drafted the tokens, and after a call that was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outpace import _fast
from outpace.common.arrays import I32, common_prefix
from outpace.drafters.base import RowView
from outpace.errors import DrafterError, MemoryLimitError
from outpace.models.base import Batch, Model, Output

CATCH_UP = 64  # tokens that rows catch up with in a step, together: others that decode wait for it
LEAST = 16  # of one row, at least
PIECE = 512  # tokens of one row in one forward, at most; a row whose size is fixed catches up with as many a step


class OwnCache:
    """Rows of ``model``, named by the target's rows and made when they are first used. Token ids are the draft model's.

    The model is this cache's alone: rows that an interrupted call left are freed. ``native`` drafts from the same rows
    in C++. Raises DrafterError for a model with recurrent layers.
    """

    def __init__(self, model: Model) -> None:
        if model.kv.recurrent:
            raise DrafterError(
                f"{model.info.name} has recurrent layers, whose states do not go back to where a draft began: give a "
                "draft model with attention alone"
            )
        self.model = model
        self._rows = _fast.native.DraftRows()

    def begin(self, row: int, tokens: I32, start: int = 0) -> I32:
        """Roll the row back to what it has in common with ``tokens`` int32 [n >= 1]; those that its KV lacks, at least
        the last one. A row that lacks some before ``start`` gets those from there on alone, and one that has no room
        for all the last half of what it has room for."""
        return self._unread(row, tokens, start, len(tokens) - 1)

    def catch_up(self, view: RowView, tokens: I32, unread: I32, rows: int, each: float = 1.0) -> I32:
        """What is left to feed of ``unread``, which ``begin`` gave: none where it is more than one of so many ``rows``
        reads in a step. Then the first of it are read now. A row that there is no memory for is released. ``each``: of
        these ids for one of the target's, so that a row reads more than a step adds."""
        most = math.ceil((max(CATCH_UP // rows, LEAST) if view.adaptive else PIECE) * each)
        if len(unread) <= most:
            return unread
        try:
            self.read({view.row: (tokens, self._rows.start(view.row), most)})
        except MemoryLimitError:
            self.release(view.row)
        return np.zeros(0, np.int32)

    def read_beside(self, rows: Sequence[tuple[int, I32, int, int]]) -> dict[int, tuple[int, int]]:
        """As ``read`` does, the rows that there is memory for, from the first on. The others are released."""
        fit = list(rows)
        while fit:
            try:
                return self.read({row: (tokens, start, most) for row, tokens, start, most in fit})
            except MemoryLimitError:
                self.release(fit.pop()[0])
        return {}

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n positions of the row."""
        cached = self._rows.cached()[row]
        self.model.kv.truncate(cached, n)
        self._rows.put(row, cached, self._rows.tokens(row)[:n], self._rows.start(row))

    def feed(self, rows: Sequence[int], tokens: Sequence[I32]) -> tuple[Output, I32]:
        """Run new tokens of some rows, each at least one; the output, and the packed index of each row's last token.

        Raises MemoryLimitError, and what the model raises; then every row is as it was.
        """
        before = {row: len(self._rows.tokens(row)) for row in rows}
        left = list(tokens)
        try:
            while any(len(rest) > PIECE for rest in left):
                long = [i for i, rest in enumerate(left) if len(rest) > PIECE]
                self._forward([rows[i] for i in long], [left[i][:PIECE] for i in long], wanted=False)
                for i in long:
                    left[i] = left[i][PIECE:]
            output, batch = self._forward(rows, left, wanted=True)
        except BaseException:
            for row, count in before.items():
                self.truncate(row, count)
            raise
        return output, batch.starts[1:] - 1

    def read(self, rows: Mapping[int, tuple[I32, int, int]]) -> dict[int, tuple[int, int]]:
        """Make each row's KV that of its tokens int32 [n] from a start on, of which it may have a beginning, with no
        more than so many new ones. How many of its tokens it has then, and how many were read. Raises
        MemoryLimitError."""
        found, new = dict[int, tuple[int, int]](), dict[int, I32]()
        for row, (tokens, start, most) in rows.items():
            unread = self._unread(row, tokens, start, len(tokens))
            new[row] = unread[:most]
            found[row] = len(tokens) - len(unread) + len(new[row]), len(new[row])
        while new := {row: rest for row, rest in new.items() if len(rest)}:
            self._forward(list(new), [rest[:PIECE] for rest in new.values()], wanted=False)
            new = {row: rest[PIECE:] for row, rest in new.items()}
        return found

    def _forward(
        self, rows: Sequence[int], tokens: Sequence[I32], *, wanted: bool, **inputs: Any
    ) -> tuple[Output, Batch]:
        """One forward; ``inputs`` go to ``Batch.pack``."""
        cached, starts = self._rows.cached(), [len(self._rows.tokens(row)) for row in rows]
        batch = Batch.pack(
            [cached[row] for row in rows], tokens, starts, [wanted] * len(rows), last_only=True, **inputs
        )
        output = self.model.forward(batch)
        for row, new in zip(rows, tokens, strict=True):
            fed = np.concatenate([self._rows.tokens(row), new], dtype=np.int32)
            self._rows.put(row, cached[row], fed, self._rows.start(row))
        return output, batch

    def length(self, row: int) -> int:
        """Positions of the row that are known to be right; 0 for a row that is not there."""
        cached = self._rows.cached().get(row)
        return 0 if cached is None else min(len(self._rows.tokens(row)), self.model.kv.length(cached))

    def start(self, row: int) -> int:
        """The first of the target's tokens that the row's positions hold; 0 for a row that holds none."""
        return self._rows.start(row) if self.length(row) else 0

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many positions; it may not be there yet."""
        positions = min(positions - self.start(row), self.model.info.max_length)
        cached = self._rows.cached().get(row)
        if cached is None or cached not in self.model.kv.rows:
            return self.model.kv.bytes_for(positions)
        return self.model.kv.growth(cached, max(0, positions - self.model.kv.length(cached)))

    def __contains__(self, row: int) -> bool:
        return row in self._rows.cached()

    def fork(self, src: int, dst: int, n: int) -> None:
        """``dst`` starts with what is known of the first n positions of ``src``; nothing where ``src`` is unknown."""
        self.release(dst)
        if src in self:
            self._ensure(dst)
            cached = self._rows.cached()
            n = self.model.kv.reachable(cached[src], max(min(n - self.start(src), self.length(src)), 0))
            self.model.kv.fork(cached[src], cached[dst], n)
            self._rows.put(dst, cached[dst], self._rows.tokens(src)[:n], self.start(src))

    def release(self, row: int) -> None:
        """Forget the row, if it is known."""
        self._rows.release(row)
        self._settle()

    def _ensure(self, row: int) -> None:
        """Make the row if it is not there."""
        self._settle()
        if row not in self:
            self._rows.put(row, self.model.kv.alloc(), np.zeros(0, np.int32))

    def _unread(self, row: int, tokens: I32, start: int, most: int) -> I32:
        """Roll the row back to what it has in common with the first ``most`` of ``tokens``; those that its KV lacks."""
        longest, last = self.model.info.max_length, len(tokens) - 1
        self._ensure(row)
        first, start = self._rows.start(row), min(start, last)
        known = common_prefix(self._rows.tokens(row)[: self.length(row)], tokens[first:most])
        known = self.model.kv.reachable(self._rows.cached()[row], known)
        if not known or first + known < start:
            known, first = 0, start
        if len(tokens) - first >= longest:
            known, first = 0, max(start, last - longest // 2)
        self.truncate(row, known)
        self._rows.put(row, self._rows.cached()[row], self._rows.tokens(row), first)
        return np.array(tokens[first + known :], np.int32)

    def _settle(self) -> None:
        """Free rows without an owner, and forget those that are gone: an interrupted call leaves such."""
        there, ours = set(self.model.kv.rows), self._rows.cached()
        for gone in there - set(ours.values()):
            self.model.kv.free(gone)
        for row, cached in ours.items():
            if cached not in there:
                self._rows.release(row)

    def native(self, vocab: int) -> _fast.native.ModelDrafter | None:
        """Drafts what ``ChainDrafter`` does, in ids below ``vocab``; None for a model
        that is not native."""
        if self.model.native is None:
            return None
        return _fast.native.ModelDrafter(
            self.model.native, self._rows, vocab, self.model.info.max_length, CATCH_UP, LEAST, PIECE
        )

    @property
    def bytes(self) -> int:
        return self.model.kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        known = set(self._rows.cached())
        assert known <= set(rows), f"rows {known - set(rows)} were never released"
        self._settle()
        self.model.kv.check()
