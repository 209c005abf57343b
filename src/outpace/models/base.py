"""The seam between the engine and whatever computes: Model, Batch, Output, KVCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outpace.arrays import F32, I32
from outpace.exact.drafts import Draft, Verdict
from outpace.exact.sampling import Chooser, TokenLogprob


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the drafters need to know of a model."""

    name: str
    backend: str  # "transformers" or "native"
    vocab_size: int  # rows of the output head
    hidden_size: int
    layers: int
    max_length: int  # most positions a row can have
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    weight_bytes: int
    kv_bytes_per_position: int


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of B rows, packed one row after the other: N tokens in all.

    ``token``, ``row``, ``position``, ``parent`` int32 [N]; ``starts`` int32 [B + 1] bounds the rows. ``parent`` is the
    index, within the row's own new tokens, of the token that this one follows; -1 follows everything the row has
    cached. A chain is -1, 0, 1, ...; in a tree, siblings share a parent and a position. A token attends to the row's
    cached positions, its ancestors and itself. ``wanted`` int32 [M]: packed indices whose logits are needed, ascending.
    ``taps``: layers whose outputs are needed. ``layers``: run only the first so many (None: all).
    """

    token: I32
    row: I32
    position: I32
    parent: I32
    starts: I32
    wanted: I32
    taps: tuple[int, ...] = ()
    layers: int | None = None

    @staticmethod
    def pack(
        rows: Sequence[int],
        tokens: Sequence[I32],
        starts_at: Sequence[int],
        wanted: Sequence[bool],
        parents: Sequence[I32 | None] | None = None,
        *,
        last_only: bool = False,
        taps: tuple[int, ...] = (),
        layers: int | None = None,
    ) -> Batch:
        """Pack ``tokens[b]`` int32 [n_b] for ``rows[b]``; the row's first new token stands at ``starts_at[b]``.

        ``wanted[b]``: whether the logits of the row's new tokens are needed, with ``last_only`` those of its last one.
        ``parents[b]`` as in the class (None: a chain).
        """
        counts = [len(t) for t in tokens]
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        n = int(starts[-1])
        position, parent = np.empty(n, np.int32), np.empty(n, np.int32)
        for b, count in enumerate(counts):
            at = slice(starts[b], starts[b + 1])
            tree = None if parents is None else parents[b]
            if tree is None:
                position[at] = np.arange(starts_at[b], starts_at[b] + count)
                parent[at] = np.arange(-1, count - 1)
            else:
                parent[at] = tree
                depth = np.zeros(count, np.int32)
                for i, p in enumerate(tree.tolist()):
                    depth[i] = 0 if p < 0 else depth[p] + 1
                position[at] = starts_at[b] + depth
        asked = np.repeat(np.asarray(wanted, bool), counts)
        if last_only:
            asked &= np.isin(np.arange(n), starts[1:] - 1)
        return Batch(
            token=np.concatenate(tokens).astype(np.int32) if n else np.zeros(0, np.int32),
            row=np.repeat(np.asarray(rows, np.int32), counts),
            position=position,
            parent=parent,
            starts=starts,
            wanted=np.flatnonzero(asked).astype(np.int32),
            taps=taps,
            layers=layers,
        )

    @staticmethod
    def single(
        row: int, tokens: I32, start: int, parents: list[int] | None = None, taps: tuple[int, ...] = ()
    ) -> Batch:
        """One row's ``tokens`` int32 [n] from position ``start``, with all logits: what ``pack`` would give, in a third
        of the time. A step of one request is this. ``parents`` [n] as in the class (None: a chain)."""
        n = len(tokens)
        if parents is None:
            position, parent = np.arange(start, start + n, dtype=np.int32), np.arange(-1, n - 1, dtype=np.int32)
        else:
            at: list[int] = []
            for above in parents:
                at.append(start if above < 0 else at[above] + 1)
            position, parent = np.array(at, np.int32), np.array(parents, np.int32)
        return Batch(
            token=tokens,
            row=np.full(n, row, np.int32),
            position=position,
            parent=parent,
            starts=np.array([0, n], np.int32),
            wanted=np.arange(n, dtype=np.int32),
            taps=taps,
        )

    def __len__(self) -> int:
        return len(self.token)

    def is_chain(self, b: int) -> bool:
        """Whether row b's new tokens follow one another."""
        parent = self.parent[self.starts[b] : self.starts[b + 1]]
        return bool((parent == np.arange(-1, len(parent) - 1)).all())


class Output(Protocol):
    """A forward's result, lazy. Indices below are packed indices that were ``wanted``."""

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        """The target's choice int32 [n] after each token ``at`` int32 [n], under ``choosers[i]``."""

    def walk(self, start: int, draft: Draft, chooser: Chooser) -> Verdict | None:
        """``verify.walk_row`` where the logits lie: for a draft whose nodes are packed from ``start`` + 1 on, after the
        pending token at ``start``. None: it cannot be done there, so ask ``choose`` node by node."""

    def logits(self, at: I32) -> F32:
        """float32 [n, V] on the host."""

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        """Raw log-softmax at ``tokens[i]`` after ``at[i]``, with ``top[i]`` alternatives."""

    def taps(self, at: I32) -> F32:
        """Hidden states float32 [n, T, H] of the layers the batch asked for, at any packed index."""


class KVCache(Protocol):
    """Keys and values of rows. A row's slots 0 .. length - 1 are in use; what lies beyond is never read."""

    def alloc(self, capacity: int) -> int:
        """Reserve a row of ``capacity`` positions and return its index. Raises MemoryLimitError."""

    def free(self, row: int) -> None:
        """Give the row back; nothing of it remains."""

    def length(self, row: int) -> int: ...

    def capacity(self, row: int) -> int: ...

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n positions. Arithmetic: nothing is copied or cleared."""

    def compact(self, row: int, start: int, keep: I32) -> None:
        """Keep slots ``start + keep[i]`` (ascending) as ``start + i`` and end the row there: a tree's kept path."""

    def fork(self, src: int, dst: int, n: int) -> None:
        """Make ``dst``'s first n positions those of ``src``; ``dst`` ends there."""

    def bytes_for(self, capacity: int) -> int:
        """What a row of ``capacity`` positions takes."""

    @property
    def bytes(self) -> int:
        """What all rows have reserved now."""

    @property
    def limit(self) -> int | None:
        """The hard bound on ``bytes`` (None: unbounded)."""

    @property
    def rows(self) -> list[int]:
        """Rows in use, ascending."""

    def check(self) -> None:
        """Assert the cache's own invariants."""


class Model(Protocol):
    """A decoder-only language model; target and draft model alike."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def kv(self) -> KVCache: ...

    def forward(self, batch: Batch) -> Output:
        """Run the batch, write its KV at each row's end, and lengthen the rows by their new tokens.

        With ``batch.layers`` set, only those layers' KV is written.
        """

    def close(self) -> None:
        """Give back memory and threads. Calling twice is allowed."""


class HostOutput:
    """An Output over logits that are already on the host: float32 [M, V], in the order of ``wanted`` [M]."""

    def __init__(self, wanted: I32, logits: F32) -> None:
        self._wanted = wanted
        self._logits = logits

    def walk(self, start: int, draft: Draft, chooser: Chooser) -> Verdict | None:
        return None

    def logits(self, at: I32) -> F32:
        found = np.searchsorted(self._wanted, at)
        logits: F32 = self._logits[found]
        return logits

    def choose(self, at: I32, choosers: Sequence[Chooser]) -> I32:
        return choose_on_host(self.logits(at), choosers)

    def logprobs(self, at: I32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
        return logprobs_on_host(self.logits(at), tokens, top)

    def taps(self, at: I32) -> F32:
        raise ValueError("this model keeps no hidden states, so it cannot serve a drafter that reads taps")


def choose_on_host(logits: F32, choosers: Sequence[Chooser]) -> I32:
    """Choices int32 [n] from float32 ``logits`` [n, V]."""
    return np.array([c.choose(row) for c, row in zip(choosers, logits, strict=True)], np.int32)


def logprobs_on_host(logits: F32, tokens: I32, top: Sequence[int]) -> list[TokenLogprob]:
    """Raw log-softmax at ``tokens[i]`` in float32 ``logits`` [n, V]."""
    from outpace.exact.sampling import token_logprob

    return [token_logprob(row, int(t), k) for row, t, k in zip(logits, tokens, top, strict=True)]
