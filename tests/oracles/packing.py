"""What the extension does with the arrays of a step, in plain Python: packing a batch, checking drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.common.arrays import I32
from outpace.models.base import Batch


def pack_step(
    rows: Sequence[int],
    starts_at: Sequence[int],
    pending: Sequence[int],
    tokens: I32,
    widths: I32,
    parents: I32 | None,
    chunks: Sequence[I32],
    wanted: Sequence[bool],
) -> Batch:
    """A step's batch: each row's pending token with its draft, then chunks of prompts."""
    packed, trees = [], []
    for i, token in enumerate(pending):
        k = int(widths[i])
        packed.append(np.append(np.int32(token), tokens[i, :k]))
        trees.append(None if parents is None else np.append(np.int32(-1), parents[i, :k] + 1).astype(np.int32))
    asked = [*([True] * len(pending)), *wanted]
    return Batch.pack(rows, [*packed, *chunks], starts_at, asked, [*trees, *([None] * len(chunks))])


def draft_fault(tokens: I32, widths: I32, parents: I32 | None, most: list[int], vocab: int) -> str:
    """What is wrong with a proposal: "width", "token" or "parent"; "" when nothing is."""
    within = zip(widths.tolist(), most, strict=False)
    if len(widths) != len(most) or any(not 0 <= width <= min(n, tokens.shape[1]) for width, n in within):
        return "width"
    for i, width in enumerate(widths.tolist()):
        for n in range(width):
            if not 0 <= tokens[i, n] < vocab:
                return "token"
            if parents is not None and not -1 <= parents[i, n] < n:
                return "parent"
    return ""
