"""The cache of a draft model that reads the target's hidden states beside tokens (EAGLE, arXiv 2401.15077).

Position i of the draft model has the embedding of token i + 1 and the target's hidden state of position i. Committed
positions have real ones, from ``Event.taps``; what is drafted beyond them has the draft model's own prediction, and
those entries are dropped and fed again once the real states are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.arrays import I32
from outpace.drafters.base import Event
from outpace.drafters.forward.own_cache import CATCH_UP, OwnCache
from outpace.models.base import Batch, Model, Output, Taps


@dataclass(slots=True)
class _Piece:
    """Real states of ``count`` positions from ``start`` on: as they came, or as features [count, H]."""

    start: int
    count: int
    taps: Taps | None = None
    features: Any = None

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(slots=True)
class _State:
    """What is known of a row's hidden states."""

    pieces: list[_Piece] = field(default_factory=list)  # real ones that the cache lacks, by position
    final: int = 0  # entries of the cache that were not made from a prediction
    committed: int = 0  # positions that will never be taken back, as of the last ``begin``
    predicted: Taps | None = None  # the draft model's own states after what it was fed last, [1, T, H]


class FeatureCache(OwnCache):
    """An ``OwnCache`` whose entries have features. ``layer``: of ``model``, whose output predicts the next feature.

    ``fuse`` makes features [n, H] of taps [n, T, H] in the backend's own arrays (None: the first layer's). A committed
    position whose real state never came has zeros: that costs acceptance, never correctness.
    """

    def __init__(self, model: Model, layer: int, fuse: Callable[[Any], Any] | None = None) -> None:
        super().__init__(model)
        self._layer = layer
        self._fuse = fuse or (lambda taps: taps[:, 0])
        self._states: dict[int, _State] = {}

    def observe(self, events: Sequence[Event]) -> None:
        """Take in the real states of positions that became final. Nothing is run."""
        for event in events:
            if event.taps is None or not len(event.taps):
                continue
            state = self._states.setdefault(event.row, _State())
            piece = _Piece(event.start - 1, len(event.taps), event.taps)
            state.pieces = [*(p for p in state.pieces if p.end <= piece.start), piece]
            if sum(p.count for p in state.pieces if p.taps is not None) > CATCH_UP:
                self._gather(state)

    def _gather(self, state: _State) -> None:
        """Make features of all that came, so that whole forwards' states are not kept for a row that waits."""
        state.pieces = [_Piece(p.start, p.count, None, self._of(p, 0, p.count)) for p in state.pieces]

    def _of(self, piece: _Piece, first: int, last: int) -> Any:
        """Features [n, H] of a piece's positions ``first .. last - 1``, counted from its own first."""
        if piece.taps is None:
            return piece.features[first:last]
        return self._fuse(piece.taps.at(np.arange(first, last, dtype=np.int32)).native)

    def begin(self, row: int, tokens: I32) -> I32:
        """Drop what was predicted, and what ``tokens`` int32 [L] do not have; the tokens to feed, the pending one last.

        None of them where L is 1: the pending token's own entry needs the state of a position before it.
        """
        state = self._states.setdefault(row, _State())
        state.committed = len(tokens) - 1
        if state.committed < 1:
            return np.zeros(0, np.int32)
        new = super().begin(row, tokens[1:])
        state.final = min(state.final, self.length(row))
        state.pieces = [piece for piece in state.pieces if piece.end > state.final]
        return new

    def _known(self, row: int, tokens: I32) -> int:
        return min(super()._known(row, tokens), self._states[row].final)

    def _forward(
        self, rows: Sequence[int], tokens: Sequence[I32], *, wanted: bool, **inputs: Any
    ) -> tuple[Output, Batch]:
        pieces = [
            piece
            for row, its in zip(rows, tokens, strict=True)
            for piece in self._features(row, self._rows[row].count, len(its))
        ]
        taps = {"taps": (self._layer,)} if wanted else {}
        output, batch = super()._forward(rows, tokens, wanted=wanted, features=joined(pieces), **taps, **inputs)
        after = output.taps(batch.starts[1:] - 1) if wanted else None
        for i, row in enumerate(rows):
            state = self._states[row]
            state.final = max(state.final, min(self._rows[row].count, state.committed))
            state.predicted = None if after is None else after.at(np.array([i], np.int32))
        return output, batch

    def _features(self, row: int, start: int, n: int) -> list[Any]:
        """The features of positions ``start .. start + n - 1``, in pieces [m, H]."""
        state = self._states[row]
        if start >= state.committed:
            assert n == 1, "a prediction leads one position further"
            assert state.predicted is not None, "nothing was fed that a prediction could follow"
            return [self._fuse(state.predicted.native)]
        found: list[Any] = []
        at, end = start, start + n
        for piece in state.pieces:
            first, last = max(piece.start, at), min(piece.end, end)
            if first < last:
                found += self._nothing(first - at)
                found.append(self._of(piece, first - piece.start, last - piece.start))
                at = last
        return found + self._nothing(end - at)

    def _nothing(self, n: int) -> list[Any]:
        return [np.zeros((n, self.model.info.hidden_size), np.float32)] if n else []

    def fork(self, src: int, dst: int, n: int) -> None:
        source = self._states.get(src)
        if source is None:
            self.release(dst)
            return
        known = min(source.final, max(0, n - 1))  # position n - 1 is followed by another token
        super().fork(src, dst, known)
        pieces = []
        for piece in source.pieces:
            count = min(piece.count, n - 1 - piece.start)
            if count > 0:
                taps = None if piece.taps is None else piece.taps.at(np.arange(count, dtype=np.int32))
                pieces.append(_Piece(piece.start, count, taps, piece.features))
        self._states[dst] = _State(pieces, min(known, self.length(dst)))

    def release(self, row: int) -> None:
        self._states.pop(row, None)
        super().release(row)

    def check(self, rows: Sequence[int]) -> None:
        super().check(rows)
        assert set(self._states) <= set(rows), f"rows {set(self._states) - set(rows)} were never released"


def joined(pieces: Sequence[Any]) -> Any:
    """Features [N, H] of pieces [n, H], in the arrays of the backend whose pieces there are."""
    own = next((piece for piece in pieces if not isinstance(piece, np.ndarray)), None)
    if own is None:
        return np.concatenate(pieces)
    import torch

    return torch.cat([torch.as_tensor(piece).to(own.device, own.dtype) for piece in pieces])
