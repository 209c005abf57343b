"""``recycle``: token recycling (arXiv 2408.08696): what the target found likeliest after each token, when last asked.

Every forward gives the target's few likeliest tokens after the pending token and after every node, accepted or not.
They are kept as that token's list, and a tree is drafted by following the lists from the pending token on. Each row has
lists of its own, gone when the row is. With ``history`` all rows share one table that stays; that is off unless asked
for, since one user's answers then show in how fast another is answered.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace import _fast
from outpace.common.arrays import I32
from outpace.drafters.base import DraftContext, DrafterNeeds, LookupDrafter
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError

# How often the first, second, ... token of a list was the next one, on outputs of the demo model.
HIT = (0.33, 0.16, 0.05, 0.04, 0.04, 0.02, 0.02, 0.01)
LIST_BYTES = 160  # what a list takes at most, with its share of the table


class RecyclingDrafter(LookupDrafter):
    """``memory``: bytes that all lists may take together; where they are full, the largest table starts anew. Raises
    DrafterError."""

    name = "recycle"
    native: _fast.native.RecyclingLookup
    needs = DrafterNeeds(ranks=len(HIT))

    def __init__(self, *, memory: int = 64 << 20, history: bool = False) -> None:
        if memory < 1 << 20:
            raise DrafterError(f"recycle: memory is {memory} bytes: give at least memory=1 (MiB)")
        self._capacity = memory // LIST_BYTES
        super().__init__(_fast.native.RecyclingLookup(self._capacity, HIT, history))

    def rank(self, row: int, tokens: I32, ids: I32) -> None:
        self.native.rank(row, tokens, ids)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self.native.release(row)

    def check(self, rows: Sequence[int]) -> None:
        known = set(self.native.rows())
        assert known <= set(rows), f"rows {known - set(rows)} were never released"
        assert self.native.lists <= self._capacity, f"{self.native.lists} lists are kept, the bound is {self._capacity}"


def build(spec: DrafterSpec, context: DraftContext) -> RecyclingDrafter:
    return RecyclingDrafter(history=spec.flag("history", False), **spec.memory())
