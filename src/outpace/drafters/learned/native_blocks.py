"""DSpark's network on its target's native runtime: a whole draft in one call; see native/model/parallel.h.

Rows that rules or filters choose for, and those that draw from a q that must be known, get their logits here, slot by
slot. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace import _fast
from outpace.arrays import F32, I32
from outpace.drafters.learned.checkpoint import Checkpoint, ParallelConfig
from outpace.drafters.learned.native_head import noise_of
from outpace.drafters.learned.native_weights import Packing, fitting, own_type
from outpace.drafters.learned.parallel import Picker, Said
from outpace.errors import NotFiniteError
from outpace.models.native.model import NativeModel

_native = _fast.native


class NativeBlocks:
    """See ``parallel.Blocks``. The checkpoint fits the target.

    Weights take the type that ``native_weights.own_type`` says, keys and values float32 beside a float32 target, else
    bfloat16. Raises DrafterError for what does not fit.
    """

    def __init__(self, target: NativeModel, checkpoint: Checkpoint) -> None:
        config, to = checkpoint.config, own_type(target)
        assert isinstance(config, ParallelConfig)
        with fitting():
            packing, its = Packing(target, checkpoint, to), config.decoder
            layers = [packing.layer(i, its) for i in range(its.layers)]
            self._model = packing.model(its, layers, "float32" if to == "f32" else "bfloat16", None)
            at = "markov_head.markov_w{}.weight"
            markov = (packing.exact(at.format(1)), packing.narrow(at.format(2))) if config.markov_rank else None
            self._sure = None
            if config.confidence:
                weight, bias = (packing.vector(f"confidence_head.proj.{name}") for name in ("weight", "bias"))
                self._sure = weight.reshape(-1), float(bias[0])
            self._parallel = _native.Parallel(
                self._model, packing.matrix(packing.tensors["fc.weight"]), packing.vector("hidden_norm.weight"),
                packing.ids, config.block, config.mask_token, config.sample_from_anchor, markov, self._sure,
            )  # fmt: skip
        self.ids, self.max_length = packing.ids, its.max_length
        self.slots = config.block - (not config.sample_from_anchor)
        self._markov = markov is not None
        self._rows: dict[int, tuple[int, I32]] = {}  # of the target: our cache's row, positions [n] ascending

    def end(self, row: int) -> int:
        """See ``Blocks.end``."""
        its = self._rows.get(row)
        return 0 if its is None or not len(its[1]) else int(its[1][-1]) + 1

    def read(self, rows: Sequence[int], taps: Sequence[Any], positions: Sequence[I32]) -> None:
        """See ``Blocks.read``."""
        fresh = [row for row in rows if row not in self._rows]
        for row in fresh:
            self._rows[row] = self._model.kv_alloc(), np.zeros(0, np.int32)
        try:
            self._live().read(
                [
                    (self._rows[row][0], np.ascontiguousarray(its, np.float32), np.ascontiguousarray(at, np.int32))
                    for row, its, at in zip(rows, taps, positions, strict=True)
                ]
            )
        except BaseException:
            for row in fresh:
                self.release(row)
            raise
        for row, at in zip(rows, positions, strict=True):
            its, known = self._rows[row]
            self._rows[row] = its, np.concatenate([known, at])

    def draft(
        self, rows: Sequence[int], anchors: I32, positions: I32, pickers: Sequence[Picker | None], counts: I32
    ) -> Said:
        """See ``Blocks.draft``."""
        asks = [
            (self._rows[row][0], anchor, position, count, noise_of(None if pick is None else pick.noise))
            for row, anchor, position, count, pick in zip(
                rows, anchors.tolist(), positions.tolist(), counts.tolist(), pickers, strict=True
            )
        ]
        here = [i for i, pick in enumerate(pickers) if pick is not None and pick.noise is None]
        if not here:
            said = Said(*self._drafted(asks))
        else:
            shape = len(asks), int(counts.max())
            said = Said(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
            there = [i for i in range(len(asks)) if i not in here]
            if there:
                places, chances = self._drafted([asks[i] for i in there])
                said.places[there, : places.shape[1]], said.chance[there, : places.shape[1]] = places, chances
        for i, pick in enumerate(pickers):
            if pick is not None and pick.noise is not None:
                pick.took(said.chance[i, : counts[i]].tolist())
        if here:
            normed, logits = self._live().states([asks[i] for i in here])
            cuts = np.cumsum([counts[i] for i in here])[:-1]
            for i, states, its in zip(here, np.split(normed, cuts), np.split(logits, cuts), strict=True):
                self._decide(int(anchors[i]), states, its, pickers[i], said.places[i], said.chance[i])
        return said

    def _drafted(self, asks: list[tuple[Any, ...]]) -> tuple[I32, F32]:
        try:
            places, chances = self._live().draft(asks)
        except _native.NotFinite as error:
            raise NotFiniteError(str(error)) from error
        return places, chances

    def _decide(self, anchor: int, normed: F32, logits: F32, pick: Picker | None, places: I32, chance: F32) -> None:
        """A row's tokens, slot by slot: see ``Blocks.draft``."""
        assert pick is not None
        token = anchor
        for slot, found in enumerate(logits):
            if self._markov:
                found = found + self._live().bias(np.array([token], np.int32))[1][0]
            places[slot] = pick(found)
            token = int(self.ids[places[slot]])
        chance[:] = 1.0  # its picker's word is asked for

    def fork(self, src: int, dst: int, end: int) -> None:
        """See ``Blocks.fork``."""
        assert dst not in self._rows, f"row {dst} is there already"
        its = self._rows.get(src)
        n = 0 if its is None else int(np.searchsorted(its[1], end))
        if its is not None and n:
            self._rows[dst] = self._model.kv_alloc(), its[1][:n]
            self._model.kv_fork(its[0], self._rows[dst][0], n)

    def release(self, row: int) -> None:
        """See ``Blocks.release``."""
        its = self._rows.pop(row, None)
        if its is not None and self._model is not None:
            self._model.kv_free(its[0])

    def growth(self, row: int, positions: int) -> int:
        """See ``Blocks.growth``. What a draft takes for as long as it lasts is not in it."""
        its, model = self._rows.get(row), self._live_model()
        n: int = (
            model.kv_bytes_for(positions) if its is None else model.kv_growth(its[0], max(0, positions - len(its[1])))
        )
        return n

    @property
    def bytes(self) -> int:
        """See ``Blocks.bytes``."""
        n: int = 0 if self._model is None else self._model.kv_bytes
        return n

    def check(self, rows: Sequence[int]) -> None:
        """See ``Blocks.check``."""
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        model = self._live_model()
        for row, (its, positions) in self._rows.items():
            assert (np.diff(positions) > 0).all(), f"row {row} has a position twice"
            assert model.kv_length(its) == len(positions), f"row {row} has keys of other positions"
        assert sorted(its for its, _ in self._rows.values()) == model.kv_rows, "the cache's rows are not the drafter's"
        try:
            model.kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        """See ``Blocks.close``. The threads are the target's."""
        self._rows.clear()
        self._parallel = self._model = None

    def _live(self) -> Any:
        if self._parallel is None:
            raise ValueError("this drafter is closed: build it again")
        return self._parallel

    def _live_model(self) -> Any:
        self._live()
        return self._model
