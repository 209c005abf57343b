"""``parallel`` and ``medusa`` for ``ToyModel``: they hold their caller to what a row's text is, and guess well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.base import RowView
from outpace.drafters.learned.drafter import KV, Ask, LearnedDrafter, Network
from outpace.drafters.learned.medusa import HeadsNetwork, tree_of
from outpace.drafters.learned.picks import chosen
from outpace.exact.drafts import Draft, Drafts
from tests.toy import BYTES, ToyModel


class ToyBlocks(Network, KV):
    """Contexts are what the toy's hidden states say, a token and its position; predictions are ``model``'s."""

    stepwise, eager, most_levels = False, True, 4

    def __init__(self, model: ToyModel, ids: Sequence[int], max_length: int) -> None:
        self.ids, self.max_length, self._model = np.array(ids, np.int32), max_length, model
        self.texts: dict[int, dict[int, int]] = {}  # token by position
        self.kv = self

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        for row, states, at in zip(rows, hidden_states, positions, strict=True):
            assert (states[:, 0] == states[:, 1]).all()
            assert states[:, 0, 1].tolist() == at.tolist()
            text = self.texts.setdefault(row, {})
            assert at[0] > max(text, default=-1)
            text.update(zip(at.tolist(), states[:, 0, 0].astype(int).tolist(), strict=True))

    def _logits(self, row: int, position: int, after: list[int]) -> F32:
        text = [self.texts[row].get(at, 0) for at in range(position)]
        return self._model.logits_after([*text, *after])[self.ids]

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        drafts = []
        for ask in asks:
            assert not len(ask.tokens)
            chain = [ask.pending]
            for slot in range(ask.levels):
                logits = self._logits(ask.row, ask.position, chain)
                greedy = ask.chooser is None or ask.chooser.params.greedy
                place = logits.argmax() if greedy else chosen(logits, self.ids, ask.chooser, slot, 1)[0][0]
                chain.append(int(self.ids[place]))
            drafts.append(Draft.chain(chain[1:], (0.7 ** np.arange(1, len(chain))).tolist()))
        return Drafts.of(drafts)

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        after = [
            (beside, [int(token[-1])]) if isinstance(beside, int) else (beside[0], [*beside[1], int(token[-1])])
            for token, beside in zip(tokens, given, strict=True)
        ]
        return np.stack([self._logits(row, *each) for row, each in zip(rows, after, strict=True)]), after

    def length(self, row: int) -> int:
        return len(self.texts.get(row, ()))

    def truncate(self, row: int, n: int) -> None:
        self.texts[row] = dict(list(self.texts[row].items())[:n])

    def fork(self, src: int, dst: int, n: int) -> None:
        assert dst not in self.texts
        assert n <= self.length(src)
        self.texts[dst] = dict(list(self.texts[src].items())[:n])

    def release(self, row: int) -> None:
        self.texts.pop(row, None)

    def growth(self, row: int, positions: int) -> int:
        return max(positions - len(self.texts.get(row, ())), 0) * BYTES

    @property
    def bytes(self) -> int:
        return sum(map(len, self.texts.values())) * BYTES

    def check(self, rows: Sequence[int]) -> None:
        assert set(self.texts) <= set(rows)

    def close(self) -> None:
        self.texts.clear()


class CheckedBlocks(LearnedDrafter):
    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        assert isinstance(self._network, ToyBlocks)
        for view in rows:
            for at, token in self._network.texts.get(view.row, {}).items():
                assert view.tokens[at] == token, "another text's context"
                assert at <= len(view.tokens) - 2
        return super().propose(rows, sizes)


class ToyHeads(HeadsNetwork):
    """States are a token and its position; heads know that token and say what ``model`` says of it alone."""

    def __init__(self, model: ToyModel, ids: Sequence[int], count: int) -> None:
        super().__init__(np.array(ids, np.int32), count, tree_of("medusa", (), count))
        self._model = model

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        for ask in asks:
            assert ask.hidden_states.shape[:2] == (1, 1)
            assert ask.hidden_states[0, 0, 1] == ask.position - 1, "another position's state"
            assert ask.tokens.tolist() == [ask.pending]
        return super().draft(asks)

    def logits(self, states: Sequence[Any]) -> F32:
        each = range(1, (self.most_levels or 0) + 1)
        of = [[self._model.logits_after([int(state[0])] * k)[self.ids] for k in each] for state in states]
        return np.array(of, np.float32)


def parallel(model: ToyModel, ids: Sequence[int], vocab: int, max_length: int) -> LearnedDrafter:
    return CheckedBlocks(ToyBlocks(model, ids, max_length), (0, 2), "parallel", vocab)


def medusa(model: ToyModel, ids: Sequence[int], vocab: int) -> LearnedDrafter:
    return LearnedDrafter(ToyHeads(model, ids, 3), (0,), "medusa", vocab)
