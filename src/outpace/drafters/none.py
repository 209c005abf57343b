"""``none``: plain decoding, through the same path."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.common.arrays import I32
from outpace.drafters.base import DraftContext, Drafter, RowView
from outpace.drafters.spec import DrafterSpec
from outpace.exact.drafts import Drafts


class NoDrafter(Drafter):
    name = "none"

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        return Drafts.empty(len(rows))


def build(spec: DrafterSpec, context: DraftContext) -> NoDrafter:
    return NoDrafter()
