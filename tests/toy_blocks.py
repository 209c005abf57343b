"""``parallel`` and ``medusa`` for ``ToyModel``: they hold their caller to what a row's text is, and guess well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.base import RowView
from outpace.drafters.learned.medusa import MedusaDrafter, tree_of
from outpace.drafters.learned.parallel import BlockDrafts, ParallelDrafter, Picker
from outpace.exact.drafts import Drafts
from tests.toy import BYTES, ToyModel


class ToyBlocks:
    """Contexts are what the toy's hidden states say, a token and its position; predictions are ``model``'s."""

    slots, rows = 4, None

    def __init__(self, model: ToyModel, ids: Sequence[int], max_length: int) -> None:
        self.ids, self.max_length, self._model = np.array(ids, np.int32), max_length, model
        self.texts: dict[int, dict[int, int]] = {}  # token by position

    def end(self, row: int) -> int:
        return max(self.texts.get(row, [-1])) + 1

    def read(self, rows: Sequence[int], hidden_states: Sequence[Any], positions: Sequence[I32]) -> None:
        for row, states, at in zip(rows, hidden_states, positions, strict=True):
            assert (states[:, 0] == states[:, 1]).all()
            assert states[:, 0, 1].tolist() == at.tolist()
            assert at[0] >= self.end(row)
            self.texts.setdefault(row, {}).update(zip(at.tolist(), states[:, 0, 0].astype(int).tolist(), strict=True))

    def draft(
        self, rows: Sequence[int], anchors: I32, positions: I32, pickers: Sequence[Picker | None], counts: I32
    ) -> BlockDrafts:
        places = np.zeros((len(anchors), int(counts.max())), np.int32)
        for b, (row, anchor, position, pick) in enumerate(zip(rows, anchors, positions, pickers, strict=True)):
            text = [self.texts[row].get(at, 0) for at in range(int(position))] + [int(anchor)]
            for slot in range(places.shape[1]):
                logits = self._model.logits_after(text)[self.ids]
                places[b, slot] = logits.argmax() if pick is None else pick(logits)
                text.append(int(self.ids[places[b, slot]]))
        return BlockDrafts(places, np.full(places.shape, 0.7, np.float32))

    def fork(self, src: int, dst: int, end: int) -> None:
        assert dst not in self.texts
        if kept := {at: token for at, token in self.texts.get(src, {}).items() if at < end}:
            self.texts[dst] = kept

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


class CheckedParallel(ParallelDrafter):
    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        assert isinstance(self._network, ToyBlocks)
        for view in rows:
            for at, token in self._network.texts.get(view.row, {}).items():
                assert view.tokens[at] == token, "another text's context"
                assert at <= len(view.tokens) - 2
        return super().propose(rows, sizes)


class ToyHeads:
    """States are a token and its position; heads know that token and say what ``model`` says of it alone."""

    rows = None

    def __init__(self, model: ToyModel, ids: Sequence[int], count: int) -> None:
        self.ids, self._model, self._count = np.array(ids, np.int32), model, count
        self.kept: dict[int, tuple[int, Any]] = {}

    def keep(self, row: int, position: int, state: Any) -> None:
        self.kept[row] = position, state

    def position(self, row: int) -> int:
        return self.kept.get(row, (-1,))[0]

    def logits(self, rows: Sequence[int]) -> F32:
        of = [
            [self._model.logits_after([int(self.kept[row][1][0])] * (k + 1))[self.ids] for k in range(self._count)]
            for row in rows
        ]
        return np.array(of, np.float32)

    def fork(self, src: int, dst: int) -> None:
        self.kept[dst] = self.kept[src]

    def release(self, row: int) -> None:
        self.kept.pop(row, None)

    def known(self) -> list[int]:
        return list(self.kept)

    def close(self) -> None:
        self.kept.clear()


class CheckedMedusa(MedusaDrafter):
    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        assert isinstance(self._network, ToyHeads)
        for view in rows:
            if self._network.position(view.row) == len(view.tokens) - 1:
                assert self._network.kept[view.row][1].tolist() == [view.tokens[-2], len(view.tokens) - 2]
        return super().propose(rows, sizes)


def parallel(model: ToyModel, ids: Sequence[int], vocab: int, max_length: int) -> ParallelDrafter:
    return CheckedParallel(ToyBlocks(model, ids, max_length), (0, 2), "parallel", vocab)


def medusa(model: ToyModel, ids: Sequence[int]) -> MedusaDrafter:
    return CheckedMedusa(ToyHeads(model, ids, 3), tree_of("medusa", (), 3), 0, "medusa")
