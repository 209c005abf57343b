"""``parallel`` and ``medusa`` for ``ToyModel``: they hold their caller to what a row's text is, and guess well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace.arrays import F32, I32
from outpace.drafters.base import RowView
from outpace.drafters.learned.contexts import ContextBlocks, Contexts
from outpace.drafters.learned.medusa import MedusaDrafter
from outpace.drafters.learned.parallel import ParallelDrafter, Picker, Said
from outpace.exact.drafts import Drafts
from tests.toy import ToyModel


def text_of(context: Any, last: list[int]) -> list[int]:
    """All tokens that a context [1, 2, n, 1, 2] of (token, position) tells (0 where it has none), then ``last``."""
    positions = context[0, 0, :, 0, 1].astype(int)
    text = np.zeros(positions.max(initial=-1) + 1, int)
    text[positions] = context[0, 0, :, 0, 0]
    return [*text.tolist(), *last]


class ToyBlocks:
    """Contexts are what the toy's taps say, a token and its position; predictions are ``model``'s."""

    slots = 4

    def __init__(self, model: ToyModel, ids: Sequence[int], max_length: int) -> None:
        self.ids, self.max_length, self._model = np.array(ids, np.int32), max_length, model

    def contexts(self) -> Contexts:
        return Contexts(1, 1, 2, lambda shape: np.zeros(shape, np.float32), 4)

    def context(self, taps: Sequence[Any], positions: Sequence[I32]) -> list[Any]:
        for its, at in zip(taps, positions, strict=True):
            assert (its[:, 0] == its[:, 1]).all()
            assert its[:, 0, 1].tolist() == at.tolist()
        return [np.stack([its[:, :1], its[:, :1]])[None] for its in taps]

    def draft(
        self, anchors: I32, positions: I32, contexts: Sequence[Any], pickers: Sequence[Picker | None], most: int
    ) -> Said:
        places = np.zeros((len(anchors), most), np.int32)
        for b, (anchor, position, context, pick) in enumerate(zip(anchors, positions, contexts, pickers, strict=True)):
            text = text_of(context, [int(anchor)])
            assert len(text) <= position + 1
            text = [*[0] * (int(position) + 1 - len(text)), *text]
            for slot in range(most):
                logits = self._model.logits_after(text)[self.ids]
                places[b, slot] = logits.argmax() if pick is None else pick(logits)
                text.append(int(self.ids[places[b, slot]]))
        return Said(places, np.full(places.shape, 0.7, np.float32))


class CheckedParallel(ParallelDrafter):
    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        assert isinstance(self._blocks, ContextBlocks)
        for view in rows:
            if self._blocks.end(view.row):
                its = self._blocks.contexts.read(view.row)[0, 0, :, 0]
                assert its[:, 0].tolist() == view.tokens[its[:, 1].astype(int)].tolist(), "another text's context"
                assert its[-1, 1] <= len(view.tokens) - 2
        return super().propose(rows, sizes)


class ToyHeads:
    """States are a token and its position; heads know that token and say what ``model`` says of it alone."""

    def __init__(self, model: ToyModel, ids: Sequence[int], count: int) -> None:
        self.ids, self._model, self._count = np.array(ids, np.int32), model, count

    def logits(self, states: Sequence[Any]) -> F32:
        of = [
            [self._model.logits_after([int(its[0])] * (k + 1))[self.ids] for k in range(self._count)] for its in states
        ]
        return np.array(of, np.float32)


class CheckedMedusa(MedusaDrafter):
    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        for view in rows:
            if view.row in self._rows and self._rows[view.row][0] == len(view.tokens) - 1:
                assert self._rows[view.row][1].tolist() == [view.tokens[-2], len(view.tokens) - 2]
        return super().propose(rows, sizes)


def parallel(model: ToyModel, ids: Sequence[int], vocab: int, max_length: int) -> ParallelDrafter:
    return CheckedParallel(ContextBlocks(ToyBlocks(model, ids, max_length)), (0, 2), "parallel", vocab)


def medusa(model: ToyModel, ids: Sequence[int]) -> MedusaDrafter:
    return CheckedMedusa(ToyHeads(model, ids, 3), 3, (), 0, "medusa")
