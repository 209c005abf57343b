"""Frozen values between the rooms: what was drafted, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.arrays import F32, F64, I32


@dataclass(frozen=True, slots=True)
class Draft:
    """One row's proposal: a view into ``Drafts``. ``parents[i]`` is a node before i, or -1: the pending token."""

    tokens: I32  # [k]
    parents: I32 | None = None  # [k]; None: a chain
    q: F64 | None = None  # [k, V]; None: one-hot

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else int(self.parents[node])

    def path(self, node: int) -> I32:
        """The nodes int32 [depth] from the first after the pending token down to ``node`` (-1: none)."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return np.array(nodes[::-1], np.int32)

    def children(self, node: int) -> list[int]:
        """Children of draft node ``node`` (-1: of the pending token), in the order in which they were proposed."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self) else []
        return [int(i) for i in np.flatnonzero(self.parents == node)]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was drafted for a batch in one step: B rows, at most W nodes each.

    ``tokens`` int32 [B, W]; ``widths`` int32 [B]: nodes in use; ``parents`` int32 [B, W], each smaller than its own
    index, -1 the pending token (None: chains); ``q`` float64 [B, W, V], the distribution each node was drawn from
    (None: one-hot, a deterministic drafter); ``confidence`` float32 [B, W]; ``source`` uint8 [B, W] into ``sources``.
    """

    tokens: I32
    widths: I32
    parents: I32 | None = None
    q: F64 | None = None
    confidence: F32 | None = None
    source: npt.NDArray[np.uint8] | None = None
    sources: tuple[str, ...] = ()

    @staticmethod
    def empty(rows: int) -> Drafts:
        return Drafts(np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32))

    @staticmethod
    def chains(proposals: Sequence[Sequence[int] | I32], source: str = "") -> Drafts:
        """Chains of token ids, one list a row, from a deterministic drafter."""
        widths = np.array([len(p) for p in proposals], np.int32)
        tokens = np.zeros((len(proposals), int(widths.max(initial=0))), np.int32)
        for i, proposal in enumerate(proposals):
            tokens[i, : len(proposal)] = proposal
        return Drafts(tokens, widths, sources=(source,) if source else ())

    def __len__(self) -> int:
        return len(self.widths)

    def row(self, i: int) -> Draft:
        k = int(self.widths[i])
        return Draft(
            self.tokens[i, :k],
            None if self.parents is None else self.parents[i, :k],
            None if self.q is None else self.q[i, :k],
        )

    def among(self, where: Sequence[int], rows: int) -> Drafts:
        """These drafts as those of rows ``where`` [B] of a batch of ``rows``; the others have none."""
        if len(where) == rows:
            return self

        def wide(values: npt.NDArray[Any] | None) -> Any:
            if values is None:
                return None
            out = np.zeros((rows, *values.shape[1:]), values.dtype)
            out[where] = values
            return out

        arrays = ("tokens", "widths", "parents", "q", "confidence", "source")
        return replace(self, **{name: wide(getattr(self, name)) for name in arrays})

    def sources_of(self, i: int) -> list[str]:
        """Who drafted each node of row i."""
        k = int(self.widths[i])
        if self.source is None:
            return [self.sources[0] if self.sources else "draft"] * k
        return [self.sources[number] for number in self.source[i, :k].tolist()]

    def source_of(self, i: int, node: int) -> str:
        """Who drafted node ``node`` of row i."""
        if not self.sources:
            return "draft"
        return self.sources[0 if self.source is None else int(self.source[i, node])]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row's outcome: ``tokens`` gained (accepted, then recovered or bonus), and the ``path`` of nodes kept."""

    tokens: I32  # [accepted + 1]
    path: I32  # [accepted] draft nodes

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Outcomes of a batch: ``tokens`` int32 [B, D + 1], ``accepted`` int32 [B], ``path`` int32 [B, D] (draft nodes)."""

    tokens: I32
    accepted: I32
    path: I32

    def __len__(self) -> int:
        return len(self.accepted)

    def __iter__(self) -> Iterator[Verdict]:
        return (self.row(i) for i in range(len(self)))

    def row(self, i: int) -> Verdict:
        a = int(self.accepted[i])
        return Verdict(self.tokens[i, : a + 1], self.path[i, :a])

    @staticmethod
    def of(rows: Sequence[Verdict]) -> Verdicts:
        if len(rows) == 1:  # the step of one request, where every microsecond shows
            tokens, path = rows[0].tokens, rows[0].path
            return Verdicts(tokens[None], np.array([len(path)], np.int32), path[None])
        deepest = max((v.accepted for v in rows), default=0)
        tokens = np.zeros((len(rows), deepest + 1), np.int32)
        path = np.zeros((len(rows), deepest), np.int32)
        for i, verdict in enumerate(rows):
            tokens[i, : verdict.accepted + 1] = verdict.tokens
            path[i, : verdict.accepted] = verdict.path
        return Verdicts(tokens, np.array([v.accepted for v in rows], np.int32), path)


def depths(parents: I32) -> I32:
    """Depth int32 [k] of each node of ``parents`` int32 [k]: 0 for a child of the pending token."""
    found = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents.tolist()):
        if not -1 <= parent < i:
            raise ValueError(f"node {i} has parent {parent}, which is not a node before it")
        found[i] = 0 if parent < 0 else found[parent] + 1
    return found


def ancestor_mask(parents: I32) -> npt.NDArray[np.bool_]:
    """bool [k, k]: whether node i attends to node j, that is: j is i itself or one of its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def is_chain(parents: list[int]) -> bool:
    """Whether every node follows the one before it."""
    return parents == list(range(-1, len(parents) - 1))
