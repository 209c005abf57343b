"""A drafter that reads the target's hidden states, with nothing learned: what a learned one needs of the seams."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.arrays import F32, I32
from outpace.drafters.base import DrafterNeeds, Event, RowView
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.forward.feature_cache import FeatureCache
from outpace.models.base import Model, Output


class TapDrafter(ChainDrafter):
    """Chains from ``draft``, a model as wide as the target, which reads the output of the target's ``layer``."""

    def __init__(self, target: Model, draft: Model, layer: int) -> None:
        super().__init__("taps", target.info.vocab_size, draft.info.vocab_size)
        self.needs = DrafterNeeds(taps=(layer,), draws=True)
        self.cache = FeatureCache(draft, draft.info.layers - 1)
        self.said: list[F32] = []  # the logits of every level, of all rows

    def _begin(self, view: RowView) -> I32:
        return self.cache.begin(view.row, view.tokens)

    def _fits(self, view: RowView, n: int) -> bool:
        return 0 < n <= self.cache.model.info.max_length - self.cache.length(view.row)

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        output, last = self.cache.feed(rows, tokens)
        self.said.append(output.logits(last))
        return output, last

    def _no_room(self, view: RowView) -> None:
        self.cache.release(view.row)

    def observe(self, events: Sequence[Event]) -> None:
        self.cache.observe(events)

    def fork(self, src: int, dst: int, n: int) -> None:
        self.cache.fork(src, dst, n)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self.cache.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self.cache.growth(row, positions)

    @property
    def bytes(self) -> int:
        return self.cache.bytes

    def check(self, rows: Sequence[int]) -> None:
        self.cache.check(rows)

    def close(self) -> None:
        self.cache.model.close()
