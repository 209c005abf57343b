"""What was drafted, and what became of it: for one row, and for a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from outpace import _fast
from outpace.common.arrays import F32, F64, I32

ASSUMED = 0.7  # a node's chance, given its parent's, where its drafter estimates none; native/drafting/draft.h, too
UNNAMED = "draft"  # the source of nodes whose drafter gives no name


@dataclass(slots=True)
class Draft:
    """One row's draft of k nodes, parents before children; -1 is the pending token.

    ``gains``: the estimated chance that a node is accepted, that is: of its whole path (NaN: unknown), never more than
    its parent's. ``sources``: who drafted it. ``q`` float64 [k, V]: what it was drawn from (None: one-hot).
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    q: F64 | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, gain: float = math.nan, source: int = 0) -> int:
        """Append a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.gains.append(gain)
        self.sources.append(source)
        return len(self.tokens) - 1

    @staticmethod
    def chain(tokens: Sequence[int], gains: Sequence[float] | None = None, source: int = 0) -> Draft:
        """A path of k tokens with its gains [k]."""
        k = len(tokens)
        return Draft(list(tokens), list(range(-1, k - 1)), list(gains or [math.nan] * k), [source] * k)

    def path(self, node: int) -> list[int]:
        """The nodes from the first after the pending token down to ``node`` (-1: none)."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def children(self, node: int) -> list[int]:
        """Children of draft node ``node`` (-1: of the pending token), in the order in which they were proposed."""
        return [i for i in range(node + 1, len(self)) if self.parents[i] == node]


def merge(proposals: Sequence[Draft], budget: int) -> Draft:
    """The ``budget`` nodes of most gain of all proposals together, best first, parents before children.

    Equal siblings become one node, since ``verify.walk`` follows only the first of them; its gain is the highest that
    any proposal gives it, and its source that proposal's. A gain above the parent's is cut to it; an unknown one is
    0.7 of the parent's. Ties: the node that was proposed first. Deterministic.
    """
    return Draft(*_fast.native.merge([(d.tokens, d.parents, d.gains, d.sources) for d in proposals], budget))


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was drafted for a batch in one step: B rows, at most W nodes each.

    ``tokens`` int32 [B, W]; ``widths`` int32 [B]: nodes in use; ``parents`` int32 [B, W], each smaller than its own
    index, -1 the pending token (None: chains); ``q`` float64 [B, W, V], the distribution each node was drawn from
    (None: one-hot, a deterministic drafter); ``confidence`` float32 [B, W]; ``source`` uint8 [B, W] into ``sources``;
    ``levels`` int32 [B]: drafting forwards that a row had (None: as many as the policy allowed, or none that count).
    """

    tokens: I32
    widths: I32
    parents: I32 | None = None
    q: F64 | None = None
    confidence: F32 | None = None
    source: npt.NDArray[np.uint8] | None = None
    sources: tuple[str, ...] = ()
    levels: I32 | None = None

    @staticmethod
    def empty(rows: int) -> Drafts:
        """No node for any of ``rows`` rows."""
        return Drafts(np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32))

    @staticmethod
    def chains(proposals: Sequence[Sequence[int] | I32], source: str = "") -> Drafts:
        """Chains of token ids from a deterministic drafter: ``proposals``, one list a row; ``source``: who drafted."""
        widths = np.array([len(p) for p in proposals], np.int32)
        tokens = np.zeros((len(proposals), int(widths.max(initial=0))), np.int32)
        for i, proposal in enumerate(proposals):
            tokens[i, : len(proposal)] = proposal
        return Drafts(tokens, widths, sources=(source,) if source else ())

    def __len__(self) -> int:
        return len(self.widths)

    @staticmethod
    def of(rows: Sequence[Draft], sources: tuple[str, ...] = ()) -> Drafts:
        """The batch of ``rows``, one draft each. ``sources``: names of the drafts' source numbers."""
        b, w = len(rows), max((len(draft) for draft in rows), default=0)
        tokens, parents = np.zeros((b, w), np.int32), np.full((b, w), -1, np.int32)
        confidence, source = np.zeros((b, w), np.float32), np.zeros((b, w), np.uint8)
        for i, draft in enumerate(rows):
            k = len(draft)
            tokens[i, :k], parents[i, :k] = draft.tokens, draft.parents
            confidence[i, :k], source[i, :k] = draft.gains, draft.sources
        trees = None if all(is_chain(draft.parents) for draft in rows) else parents
        widths = np.array([len(draft) for draft in rows], np.int32)
        named = source if len(sources) > 1 else None
        return Drafts(tokens, widths, trees, confidence=confidence, source=named, sources=sources)

    def row(self, i: int) -> Draft:
        """Row ``i``'s draft: a copy, but for ``q``."""
        k = int(self.widths[i])
        return Draft(
            self.tokens[i, :k].tolist(),
            list(range(-1, k - 1)) if self.parents is None else self.parents[i, :k].tolist(),
            [math.nan] * k if self.confidence is None else self.confidence[i, :k].tolist(),
            [0] * k if self.source is None else self.source[i, :k].tolist(),
            None if self.q is None else self.q[i, :k],
        )

    def normalized(self, vocab: int) -> Drafts:
        """With ``q`` float64, every node's a distribution over ``vocab`` tokens that its token may come from: a sum
        that is off by up to 0.001 is mended. Raises ValueError for anything else."""
        if self.q is None:
            return self
        rows, most = self.tokens.shape
        if not isinstance(self.q, np.ndarray) or self.q.dtype.kind != "f" or self.q.shape != (rows, most, vocab):
            shape = getattr(self.q, "shape", type(self.q).__name__)
            raise ValueError(f"its q is {shape}, and must be an array of floats {(rows, most, vocab)}")
        q = self.q.astype(np.float64, copy=False)
        for i, width in enumerate(self.widths.tolist()):
            of = q[i, :width]
            sums = of.sum(axis=1)
            if not (of >= 0).all() or not (np.abs(sums - 1) <= 1e-3).all():
                raise ValueError("its q is no distribution: each row must be at least 0 and sum to 1")
            if not (of[np.arange(width), self.tokens[i, :width]] > 0).all():
                raise ValueError("it proposed a token that its own q rules out")
            if (np.abs(sums - 1) > 1e-9).any():
                q = q.copy() if q is self.q else q
                q[i, :width] = of / sums[:, None]
        return self if q is self.q else replace(self, q=q)

    def among(self, where: Sequence[int], rows: int) -> Drafts:
        """These drafts as those of rows ``where`` [B] of a batch of ``rows``; the others have none."""
        return self if len(where) == rows else Drafts.join([(where, self)], rows)

    @staticmethod
    def join(parts: Sequence[tuple[Sequence[int], Drafts]], rows: int) -> Drafts:
        """One batch of ``rows`` rows from ``parts``: pairs of rows and their drafts, no row twice."""
        if len(parts) == 1 and len(parts[0][0]) == rows:
            return parts[0][1]
        w = max((drafts.tokens.shape[1] for _, drafts in parts), default=0)
        tokens, widths = np.zeros((rows, w), np.int32), np.zeros(rows, np.int32)
        parents = (
            None
            if all(d.parents is None for _, d in parts)
            else np.tile(np.arange(-1, w - 1, dtype=np.int32), (rows, 1))
        )
        q = next((np.zeros((rows, w, d.q.shape[2])) for _, d in parts if d.q is not None), None)
        confidence = None if any(d.confidence is None for _, d in parts) else np.zeros((rows, w), np.float32)
        sources = tuple(dict.fromkeys(name for _, d in parts for name in (d.sources or (UNNAMED,))))
        source = np.zeros((rows, w), np.uint8) if len(sources) > 1 else None
        levels = np.zeros(rows, np.int32) if any(d.levels is not None for _, d in parts) else None
        for where, drafts in parts:
            at, n = np.asarray(where, np.intp), drafts.tokens.shape[1]
            tokens[at, :n], widths[at] = drafts.tokens, drafts.widths
            if parents is not None and drafts.parents is not None:
                parents[at, :n] = drafts.parents
            if q is not None:
                q[at, :n] = drafts.one_hot(q.shape[2]) if drafts.q is None else drafts.q
            if confidence is not None and drafts.confidence is not None:
                confidence[at, :n] = drafts.confidence
            if levels is not None and drafts.levels is not None:
                levels[at] = drafts.levels
            if source is not None:
                names = np.array([sources.index(name) for name in drafts.sources or (UNNAMED,)], np.uint8)
                source[at, :n] = names[0] if drafts.source is None else names[drafts.source]
        return Drafts(tokens, widths, parents, q, confidence, source, sources, levels)

    def one_hot(self, vocab: int) -> F64:
        """q float64 [B, W, ``vocab``] of a deterministic drafter."""
        q = np.zeros((*self.tokens.shape, vocab))
        np.put_along_axis(q, self.tokens[..., None].astype(np.intp), 1.0, axis=2)
        return q

    def sources_of(self, i: int) -> list[str]:
        """Who drafted each node of row ``i``."""
        k = int(self.widths[i])
        if self.source is None:
            return [self.sources[0] if self.sources else UNNAMED] * k
        return [self.sources[number] for number in self.source[i, :k].tolist()]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row's outcome: ``tokens`` int32 [accepted + 1] gained (accepted ones, then the recovered or bonus token), and
    the ``path`` int32 [accepted] of draft nodes kept."""

    tokens: I32
    path: I32

    @property
    def accepted(self) -> int:
        """How many draft tokens the target agreed with."""
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
        """Row ``i``'s outcome."""
        a = int(self.accepted[i])
        return Verdict(self.tokens[i, : a + 1], self.path[i, :a])

    def lists(self) -> list[tuple[list[int], list[int]]]:
        """Every row's tokens and path, as lists."""
        tokens, path = self.tokens.tolist(), self.path.tolist()
        return [(tokens[i][: a + 1], path[i][:a]) for i, a in enumerate(self.accepted.tolist())]

    @staticmethod
    def of(rows: Sequence[Verdict]) -> Verdicts:
        """One batch of ``rows``, a verdict each."""
        deepest = max((v.accepted for v in rows), default=0)
        tokens = np.zeros((len(rows), deepest + 1), np.int32)
        path = np.zeros((len(rows), deepest), np.int32)
        for i, verdict in enumerate(rows):
            tokens[i, : verdict.accepted + 1] = verdict.tokens
            path[i, : verdict.accepted] = verdict.path
        return Verdicts(tokens, np.array([v.accepted for v in rows], np.int32), path)


def depths(parents: I32) -> I32:
    """Depth int32 [k] of each node of ``parents`` int32 [k]: 0 for a child of the pending token. Raises ValueError."""
    found: list[int] = []
    for i, parent in enumerate(parents.tolist()):
        if not -1 <= parent < i:
            raise ValueError(f"node {i} has parent {parent}, which is not a node before it")
        found.append(0 if parent < 0 else found[parent] + 1)
    return np.array(found, np.int32)


def ancestors(parents: I32) -> npt.NDArray[np.bool_]:
    """bool [k, k]: whether node i attends to node j, that is: j is i itself or one of its ancestors.

    Raises ValueError.
    """
    mask = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents.tolist()):
        if not -1 <= parent < i:
            raise ValueError(f"node {i} has parent {parent}, which is not a node before it")
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


def is_chain(parents: list[int]) -> bool:
    """Whether every node follows the one before it."""
    return parents == list(range(-1, len(parents) - 1))
