"""A draft model's KV cache, in step with the target's rows.

What the draft model has in its cache is compared with what it should have before every draft, so it is in step after
any verdict, including full acceptance, whoever drafted the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.arrays import I32, common_prefix
from outpace.models.base import Batch, Model, Output

CATCH_UP = 512  # tokens of one row that are caught up with in one forward


@dataclass(slots=True)
class _Row:
    """A target row's counterpart: its row in the draft model's cache, and the tokens whose KV is there."""

    row: int
    agreed: int = 0  # that many are known to equal the row's tokens
    ahead: list[int] = field(default_factory=list)  # those after them: fate unknown


class OwnCache:
    """Rows of ``model``, named by the target's rows. Token ids are the draft model's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._rows: dict[int, _Row] = {}

    def begin(self, row: int, tokens: I32 | list[int]) -> I32:
        """Roll the row back to ``tokens`` [n >= 1], whose first so many it was told before; those that its KV lacks
        (at least one)."""
        state = self._rows[row]
        ahead = np.array(state.ahead, np.int32)
        known = state.agreed + common_prefix(ahead, np.asarray(tokens[state.agreed :], np.int32))
        known = min(known, len(tokens) - 1)
        self.model.kv.truncate(state.row, known)
        state.agreed, state.ahead = known, []
        return np.array(tokens[known:], np.int32)

    def rewind(self, row: int, n: int) -> None:
        """Of the tokens that the row was told, only the first n still hold."""
        state = self._rows[row]
        if n < state.agreed:
            self.model.kv.truncate(state.row, n)
            state.agreed, state.ahead = n, []

    def feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        """Run new tokens of some rows; the output, and the packed index of each row's last token."""
        while any(len(t) > CATCH_UP for t in tokens):
            long = [i for i, t in enumerate(tokens) if len(t) > CATCH_UP]
            self._forward([rows[i] for i in long], [tokens[i][:CATCH_UP] for i in long], wanted=False)
            for i in long:
                tokens[i] = tokens[i][CATCH_UP:]
        output, batch = self._forward(rows, tokens, wanted=True)
        return output, batch.starts[1:] - 1

    def _forward(self, rows: list[int], tokens: list[I32], *, wanted: bool) -> tuple[Output, Batch]:
        states = [self._rows[row] for row in rows]
        starts = [self.model.kv.length(state.row) for state in states]
        batch = Batch.pack([state.row for state in states], tokens, starts, [wanted] * len(rows), last_only=True)
        output = self.model.forward(batch)
        for state, its in zip(states, tokens, strict=True):
            state.ahead.extend(its.tolist())
        return output, batch

    def length(self, row: int) -> int:
        return self.model.kv.length(self._rows[row].row)

    def capacity(self, row: int) -> int:
        return self.model.kv.capacity(self._rows[row].row)

    def admit(self, row: int, capacity: int) -> None:
        self._rows[row] = _Row(self.model.kv.alloc(self._capacity(capacity)))

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def fork(self, src: int, dst: int, n: int, tokens: Sequence[int] | None = None) -> None:
        """``dst`` starts with at most n tokens of ``src``: agreed ones, or, given as ``tokens``, of unknown fate."""
        source, target = self._rows[src], self._rows[dst]
        n = min(n, source.agreed, self.model.kv.capacity(target.row))
        self.model.kv.fork(source.row, target.row, n)
        if tokens is None:
            target.agreed = n
        else:
            target.agreed, target.ahead = 0, list(tokens[:n])

    def release(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is not None:
            self.model.kv.free(state.row)

    def bytes_for(self, capacity: int) -> int:
        return self.model.kv.bytes_for(self._capacity(capacity))

    def _capacity(self, capacity: int) -> int:
        return min(capacity, self.model.info.max_length)

    @property
    def bytes(self) -> int:
        return self.model.kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        assert self.model.kv.rows == sorted(state.row for state in self._rows.values())
        for state in self._rows.values():
            assert self.model.kv.length(state.row) == state.agreed + len(state.ahead)
        self.model.kv.check()
