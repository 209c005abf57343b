"""``layers:N``: the target's first N layers draft, through its own final norm and head, in its own KV cache.

Self-speculation by early exit: Draft & Verify, arXiv 2309.08168; LayerSkip, arXiv 2404.16710. The first N layers
of every committed position are in the cache already, so there is nothing to catch up with and no memory to reserve. A
drafting forward writes N layers' KV behind what is committed; that is truncated away before the target's own forward
writes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.common.arrays import I32
from outpace.drafters.base import DraftContext, DrafterNeeds, RowView
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError
from outpace.exact.drafts import Drafts
from outpace.models.base import Batch, Model, Output


class LayersDrafter(ChainDrafter):
    """Chains from the first ``layers`` layers of ``target``. Raises DrafterError unless 1 <= layers < the target's, and
    where some of them are recurrent."""

    needs = DrafterNeeds(draws=True, target_rows=True)

    def __init__(self, target: Model, layers: int) -> None:
        most = target.info.layers - 1
        if not 1 <= layers <= most:
            there = f"draft with 1 to {most} of its {most + 1} layers" if most else "it has a single layer: use ngram"
            raise DrafterError(f"layers:{layers} is out of range for {target.info.name}: {there}")
        if target.kv.recurrent:
            raise DrafterError(
                f"layers:{layers} cannot draft for {target.info.name}, whose recurrent layers' states do not go back: "
                "use ngram"
            )
        super().__init__(f"layers:{layers}", target.info.vocab_size, target.info.vocab_size)
        self._target, self._layers = target, layers

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        try:
            return super().propose(rows, sizes)
        finally:
            for view in rows:
                self._target.kv.truncate(view.row, len(view.tokens) - 1)

    def _begin(self, view: RowView, asked: int) -> I32:
        return view.tokens[-1:]

    def _fits(self, view: RowView, n: int) -> bool:
        return self._target.kv.length(view.row) + n <= self._target.info.max_length

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[Output, I32]:
        starts = [self._target.kv.length(row) for row in rows]
        batch = Batch.pack(rows, tokens, starts, [True] * len(rows), layers=self._layers)
        return self._target.forward(batch), np.arange(len(rows), dtype=np.int32)


def build(spec: DrafterSpec, context: DraftContext) -> LayersDrafter:
    assert spec.argument is not None
    try:
        layers = int(spec.argument)
    except ValueError:
        raise DrafterError(f"{spec.text}: {spec.argument!r} is not a number of layers, as in layers:10") from None
    return LayersDrafter(context.target, layers)
