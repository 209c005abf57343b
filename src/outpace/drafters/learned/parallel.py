"""``parallel:PATH``: a block of tokens from one small forward (DSpark, arXiv 2607.05147).

The block stands at the pending token and reads the target's hidden states of all positions before it, as keys and
values of its own that are computed once, when a position has become final. Where they never came, a position is left
out: each has its own place in attention, so that costs acceptance alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, F64, I32
from outpace.drafters.base import Drafter, DrafterNeeds, Event, RowView, levels
from outpace.drafters.composed import ASSUMED
from outpace.drafters.learned.picks import chosen, level_by_level
from outpace.errors import NotFiniteError, NoTokenAllowedError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser


class Picker(Protocol):
    """What chooses a row's tokens, slot by slot."""

    noise: Chooser | None  # whose noise alone chooses, of the first slot; None: that, and what this one knows

    def __call__(self, logits: F32) -> int:
        """An index into the draft vocabulary, of the next slot's logits float32 [D]."""

    def took(self, chances: list[float]) -> None:
        """Instead of being called: by ``noise`` tokens were chosen, with such chances as ``picks.chosen`` has."""


class BlockDrafts(NamedTuple):
    """What was drafted. ``places`` int32 [B, n] in the draft vocabulary; ``chance`` float32 [B, n]: that a slot is
    accepted where those before it are, as the confidence head says, or without one the network's own probability.
    Neither is meant beyond a row's count, nor ``chance`` where a picker knows it."""

    places: I32
    chance: F32


class ParallelRuntime(Protocol):
    """The network, and what it has of rows: keys and values of the target's hidden states, each with its position.

    Rows are made when they are first read for. A row's results do not depend on the others of a call (in torch, up to
    rounding)."""

    ids: I32  # the target's token ids [D] of the draft vocabulary, ascending
    slots: int  # tokens that a block gives
    max_length: int  # positions that it knows

    @property
    def rows(self) -> _fast.native.ParallelRows | None:
        """Draft with it in C++; None: not there."""

    def end(self, row: int) -> int:
        """The position after the row's last one; 0 for a row that is not there."""

    def read(self, rows: Sequence[int], hidden_states: Sequence[Any], positions: Sequence[I32]) -> None:
        """Append to each row its ``hidden_states`` [n, T, h], in the arrays of the target's backend, at ``positions``
        int32 [n], ascending and beyond its last one."""

    def draft(
        self, rows: Sequence[int], anchors: I32, positions: I32, pickers: Sequence[Picker | None], counts: I32
    ) -> BlockDrafts:
        """The first ``counts`` int32 [B] tokens of a block for each row, which has been read for: its pending token
        int32 [B], where that stands, and who picks (None: the likeliest, the lowest id on ties). Each slot knows the
        one before. Raises NotFiniteError."""

    def fork(self, src: int, dst: int, end: int) -> None:
        """``dst``, which is not there, begins with what ``src`` has of positions below ``end``."""

    def release(self, row: int) -> None:
        """Forget the row, if it is there."""

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many positions."""

    @property
    def bytes(self) -> int:
        """What all rows take now."""

    def check(self, rows: Sequence[int]) -> None:
        """Assert own invariants, given the only rows that may be there."""

    def close(self) -> None:
        """Give back memory. Calling twice is allowed."""


class ParallelDrafter(Drafter):
    """Chains of what ``network`` predicts. ``layers``: of the target, in the network's order.

    Greedy rows' ``confidence`` is the confidence head's. Rows that sample under ``coupled`` share the request's noise,
    and their probabilities are those of ``picks.chosen``. Rows whose rules say what is allowed, and those that
    sample under ``rejection``, draw from what rules and filters leave, the latter with their q.
    """

    retires = True

    def __init__(self, network: ParallelRuntime, layers: Sequence[int], name: str, vocab: int) -> None:
        needed = tuple(sorted(set(layers)))
        self.name, self._network, self._vocab = name, network, vocab
        self.needs = DrafterNeeds(hidden_layers=needed, draws=True)
        self._columns = [needed.index(layer) for layer in layers]
        self.native, self.names = network.rows, (name,)

    def observe(self, events: Sequence[Event]) -> None:
        rows, states, positions = list[int](), list[Any](), list[I32]()
        for event in events:
            if event.hidden_states is None:
                continue
            at = np.arange(event.start - 1, event.start - 1 + len(event.hidden_states), dtype=np.int32)
            new = np.flatnonzero((at >= self._network.end(event.row)) & (at < self._network.max_length))
            if len(new):
                rows.append(event.row)
                states.append(event.hidden_states.at(new.astype(np.int32)).layers(self._columns).native)
                positions.append(at[new])
        if rows:
            self._network.read(rows, states, positions)

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        reach = np.minimum(levels(rows, sizes), self._network.slots).astype(np.int32)
        ready = [
            i
            for i, view in enumerate(rows)
            if reach[i] and self._network.end(view.row) > 0 and len(view.tokens) + reach[i] <= self._network.max_length
        ]
        if not ready:
            return Drafts.empty(len(rows))
        views, most = [rows[i] for i in ready], reach[ready]
        picks = [_Pick.of(v, int(n), self._network.ids, self._vocab) for v, n in zip(views, most, strict=True)]
        drafted = self._network.draft(
            [view.row for view in views],
            np.array([view.tokens[-1] for view in views], np.int32),
            np.array([len(view.tokens) - 1 for view in views], np.int32),
            picks,
            most,
        )
        if not np.isfinite(drafted.chance).all():
            raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
        tokens, chances, widths = self._network.ids[drafted.places], drafted.chance.copy(), most.copy()
        for b, pick in enumerate(picks):
            if pick is not None:
                widths[b] = n = len(pick.chances)
                chances[b, :n] = pick.chances
        q = _distributions(tokens, picks, self._vocab)
        confidence = np.cumprod(np.clip(chances, 0, 1), 1, dtype=np.float32)
        return Drafts(tokens, widths, q=q, confidence=confidence, sources=(self.name,)).among(ready, len(rows))

    def fork(self, src: int, dst: int, n: int) -> None:
        self._network.release(dst)
        self._network.fork(src, dst, n - 1)

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        """What the row has is kept for a fork."""

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._network.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._network.growth(row, min(positions, self._network.max_length))

    @property
    def bytes(self) -> int:
        return self._network.bytes

    def check(self, rows: Sequence[int]) -> None:
        self._network.check(rows)

    def close(self) -> None:
        self._network.close()
        self.native = None


class _Pick:
    """A row's tokens where noise or rules choose them: at most ``size``, fewer where the rules allow nothing."""

    def __init__(self, view: RowView, size: int, ids: I32, vocab: int, alone: bool) -> None:
        self._size, self._ids, self._vocab, self._alone = size, ids, vocab, alone
        self._chooser, self._ended = view.chooser, False
        self._drawn = view.acceptance == "rejection" and not view.chooser.params.greedy
        self.noise = None if alone or _filters(view.chooser) else view.chooser
        self.chances: list[float] = []
        self.q: list[F64] = []  # of each token that was drawn: [V]

    @staticmethod
    def of(view: RowView, size: int, ids: I32, vocab: int) -> _Pick | None:
        alone = level_by_level(view)
        return _Pick(view, size, ids, vocab, alone) if alone or not view.chooser.params.greedy else None

    def took(self, chances: list[float]) -> None:
        self.chances = chances

    def __call__(self, logits: F32) -> int:
        if self._ended or len(self.chances) == self._size:
            return 0  # nobody reads it
        if not np.isfinite(logits).all():
            raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
        if not self._alone:
            (index,), (gain,) = chosen(logits, self._ids, self._chooser, len(self.chances), 1)
            self.chances.append(float(np.exp(gain)))
            return index
        whole = np.full(self._vocab, -np.inf, np.float32)
        whole[self._ids] = logits
        try:
            token = self._chooser.choose(whole, Stream.DRAFT if self._drawn else Stream.CHOICE)
        except NoTokenAllowedError:
            self._ended = True
            return 0
        if self._drawn:
            self.q.append(self._chooser.probabilities(whole))
        self._chooser = self._chooser.advance(token)
        self.chances.append(ASSUMED)
        return int(np.searchsorted(self._ids, token))


def _filters(chooser: Chooser) -> bool:
    """Whether some tokens cannot be chosen, however the noise falls."""
    return chooser.params.filtered


def _distributions(tokens: I32, picks: Sequence[_Pick | None], vocab: int) -> F64 | None:
    """q float64 [B, W, V], where a row has drawn; one-hot for the others."""
    if not any(pick is not None and pick.q for pick in picks):
        return None
    q = Drafts(tokens, np.zeros(len(tokens), np.int32)).one_hot(vocab)
    for b, pick in enumerate(picks):
        if pick is not None:
            for slot, own in enumerate(pick.q):
                q[b, slot] = own
    return q
