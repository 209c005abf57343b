"""The seam between a learned drafter and whatever computes its network: Head, Ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from outpace.arrays import F32, I32
from outpace.exact.drafts import Drafts
from outpace.exact.sampling import Chooser


class Ask(NamedTuple):
    """One row's draft. Entry i of a row has the target's taps of position i and the token after it, i + 1."""

    row: int
    tokens: I32  # [n >= 1] of the real entries that the row lacks, the pending token last
    taps: Any  # [n, T, H] of their positions, in the arrays of the target's backend
    nodes: int  # at most
    levels: int  # at most
    branch: int  # 1: a chain; else nodes that are expanded a level, and children of each
    chooser: Chooser | None = None  # of the next output token; None, or one without temperature: greedy


class Head(Protocol):
    """A learned drafter's network with KV of its own, one row of it for each row of the target.

    Rows are made by the first call that feeds them. A call that raises leaves every row as it was. What is drafted for
    a row follows from the row's entries and its ask, whoever else is in the call.
    """

    @property
    def ids(self) -> I32:
        """The target's token ids int32 [D] of the draft vocabulary, ascending."""

    @property
    def max_length(self) -> int:
        """Entries that a row may have."""

    def feed(self, rows: Sequence[int], tokens: Sequence[I32], taps: Sequence[Any]) -> None:
        """Append real entries: ``tokens[b]`` int32 [n_b], ``taps[b]`` [n_b, T, H]. Raises MemoryLimitError."""

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        """Feed each row its last real entries, then draft: the rows end as after the feed.

        Trees as in EAGLE-2 (arXiv 2406.16858): every level expands the ``branch`` likeliest nodes by path probability,
        the whole keeps the ``nodes`` likeliest; ``confidence`` is the path probability. Children are the tokens of the
        largest logits or, where the chooser samples, of log q + g with g the request's noise for that output token:
        then a child's probability is its share of exp(log q + g) among the best 8 (or ``branch``, if that is more).
        Its rules are ignored, and its filters may be. Ties go to the lower token id. Raises MemoryLimitError.
        """

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], taps: Sequence[Any]) -> F32:
        """Append entries and give the logits float32 [B, D] after each row's last one: a draft level by level.

        ``taps[b]`` None: one entry, ``tokens[b]`` int32 [1], that follows the row's last one of this same way, and has
        the network's own output in place of taps. ``truncate`` drops such entries again. Raises MemoryLimitError.
        """

    def length(self, row: int) -> int:
        """Entries of the row; 0 for one that is not there."""

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n entries."""

    def fork(self, src: int, dst: int, n: int) -> None:
        """Make ``dst``, which is not there, of the first n entries of ``src``. Raises MemoryLimitError."""

    def release(self, row: int) -> None:
        """Forget the row, if it is there."""

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many entries; it may not be there yet."""

    def exchange(self, other: Any) -> None:
        """Swap weights with another head of this kind, shape and draft vocabulary that has no rows. Rows here keep what
        the old weights made of their entries. Raises DrafterError and MemoryLimitError."""

    @property
    def bytes(self) -> int:
        """What all rows take now."""

    def check(self, rows: Sequence[int]) -> None:
        """Assert own invariants, given the only rows that may be there."""

    def close(self) -> None:
        """Give back memory. Calling twice is allowed."""
