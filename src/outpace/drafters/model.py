"""``model:ID``: a smaller model with the same vocabulary drafts, in its own KV cache.

What the draft model has in its cache is compared with what is committed before every draft, so it is in step after any
verdict, including full acceptance, whoever drafted the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.drafters.base import DraftContext, RowView
from outpace.drafters.chain import ChainDrafter
from outpace.errors import DrafterError
from outpace.models.base import Batch, Model, Output
from outpace.scheduler import common_prefix
from outpace.types import I32

CATCH_UP = 512  # tokens of one row that are caught up with in one forward


@dataclass(slots=True)
class _Row:
    """A target row's counterpart: its row in the draft model's cache, and the tokens whose KV is there."""

    row: int
    agreed: int = 0  # that many are known to equal the committed tokens
    ahead: list[int] = field(default_factory=list)  # those after them: drafted, fate unknown


class ModelDrafter(ChainDrafter):
    """Chains from a draft model: the choices it makes itself under the request's own parameters, rules and noise."""

    def __init__(self, model: Model, name: str, target_vocab: int) -> None:
        super().__init__(name, target_vocab, model.info.vocab_size)
        self._model = model
        self._rows: dict[int, _Row] = {}

    @classmethod
    def load(cls, spec: str, context: DraftContext) -> ModelDrafter:
        """Load the draft model ``spec`` and check that its token ids mean what the target's mean."""
        from dataclasses import replace

        from outpace.models.loader import load
        from outpace.models.tokenizer import differences

        model, tokenizer = load(spec, replace(context.options, kv_memory=None, max_length=None))
        if context.tokenizer is not None:
            differing = differences(context.tokenizer, tokenizer)
            if differing:
                listed = ", ".join(f"{i}: {a!r} / {b!r}" for i, a, b in differing)
                model.close()
                raise DrafterError(
                    f"{spec} does not share the target's vocabulary (id: target's / drafter's): {listed}. "
                    "Use a draft model of the same family"
                )
        return cls(model, f"model:{spec}", context.target.info.vocab_size)

    @property
    def model(self) -> Model:
        return self._model

    def _begin(self, view: RowView) -> I32:
        """Roll the row back to what is committed, and return the committed tokens it has not seen (at least one)."""
        state = self._rows[view.row]
        ahead = np.array(state.ahead, np.int32)
        known = state.agreed + common_prefix(ahead, view.tokens[state.agreed :])
        known = min(known, len(view.tokens) - 1)
        self._model.kv.truncate(state.row, known)
        state.agreed, state.ahead = known, []
        return view.tokens[known:].copy()

    def _fits(self, view: RowView, n: int) -> bool:
        longest = self._model.info.max_length
        return len(view.tokens) < longest and self._model.kv.length(self._rows[view.row].row) + n <= longest

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        while any(len(t) > CATCH_UP for t in tokens):
            long = [i for i, t in enumerate(tokens) if len(t) > CATCH_UP]
            self._forward([rows[i] for i in long], [tokens[i][:CATCH_UP] for i in long], wanted=False)
            for i in long:
                tokens[i] = tokens[i][CATCH_UP:]
        output, batch = self._forward(rows, tokens, wanted=True)
        return output, batch.starts[1:] - 1

    def _forward(self, rows: list[int], tokens: list[I32], *, wanted: bool) -> tuple[Output, Batch]:
        states = [self._rows[row] for row in rows]
        starts = [self._model.kv.length(state.row) for state in states]
        batch = Batch.pack([state.row for state in states], tokens, starts, [wanted] * len(rows), last_only=True)
        output = self._model.forward(batch)
        for state, its in zip(states, tokens, strict=True):
            state.ahead.extend(its.tolist())
        return output, batch

    def admit(self, row: int, capacity: int) -> None:
        self._rows[row] = _Row(self._model.kv.alloc(self._capacity(capacity)))

    def fork(self, src: int, dst: int, n: int) -> None:
        if src not in self._rows:
            return  # it was not drafted for: the new row catches up by itself
        source, target = self._rows[src], self._rows[dst]
        n = min(n, source.agreed)
        self._model.kv.fork(source.row, target.row, n)
        target.agreed = n

    def release(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is not None:
            self._model.kv.free(state.row)

    def bytes_for(self, capacity: int) -> int:
        return self._model.kv.bytes_for(self._capacity(capacity))

    def _capacity(self, capacity: int) -> int:
        return min(capacity, self._model.info.max_length)

    @property
    def bytes(self) -> int:
        return self._model.kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        assert self._model.kv.rows == sorted(state.row for state in self._rows.values())
        for state in self._rows.values():
            assert self._model.kv.length(state.row) == state.agreed + len(state.ahead)
        self._model.kv.check()

    def close(self) -> None:
        self._model.close()
