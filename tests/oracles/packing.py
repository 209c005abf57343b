"""What the extension does with the arrays of a step, in plain Python: packing a batch, checking drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.common.arrays import I32
from outpace.exact.drafts import depths


def pack_batch(
    rows: Sequence[int],
    tokens: Sequence[I32],
    starts_at: Sequence[int],
    wanted: Sequence[bool],
    trees: Sequence[I32 | None],
    last_only: bool,
) -> tuple[I32, I32, I32, I32, I32, I32]:
    """``Batch.pack``: token, row, position, parent, starts, wanted."""
    counts = [len(t) for t in tokens]
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    parent = [
        np.arange(-1, n - 1, dtype=np.int32) if tree is None else tree for n, tree in zip(counts, trees, strict=True)
    ]
    position = [first + depths(its) for first, its in zip(starts_at, parent, strict=True)]
    asked = np.repeat(np.asarray(wanted, bool), counts)
    if last_only:
        asked &= np.isin(np.arange(starts[-1]), starts[1:] - 1)
    none = np.zeros(0, np.int32)
    return (
        np.concatenate([none, *tokens]).astype(np.int32),
        np.repeat(np.asarray(rows, np.int32), counts),
        np.concatenate([none, *position]).astype(np.int32),
        np.concatenate([none, *parent]).astype(np.int32),
        starts,
        np.flatnonzero(asked).astype(np.int32),
    )


def pack_step(
    rows: Sequence[int],
    starts_at: Sequence[int],
    pending: Sequence[int],
    tokens: I32,
    widths: I32,
    parents: I32 | None,
    chunks: Sequence[I32],
    wanted: Sequence[bool],
) -> tuple[I32, I32, I32, I32, I32, I32]:
    """A step's batch: each row's pending token with its draft, then chunks of prompts."""
    packed, trees = [], []
    for i, token in enumerate(pending):
        k = int(widths[i])
        packed.append(np.append(np.int32(token), tokens[i, :k]))
        trees.append(None if parents is None else np.append(np.int32(-1), parents[i, :k] + 1).astype(np.int32))
    asked = [*([True] * len(pending)), *wanted]
    return pack_batch(rows, [*packed, *chunks], starts_at, asked, [*trees, *([None] * len(chunks))], False)


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
