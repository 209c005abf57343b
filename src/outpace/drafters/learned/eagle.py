"""``eagle:PATH``: one small layer over the target's hidden states drafts chains and trees (EAGLE-3, arXiv 2503.01840).

Entry i of a row has the target's hidden states of position i and the token that follows it, i + 1; its output predicts
token i + 2. So a row of L committed tokens has L - 1 real entries, and what the last one predicts is a draft's first
level. Where hidden states never came (a prefix that another drafter's row computed), the entries are left out:
attention knows distances, not places, so those behind them only see a shorter text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.drafters.base import DraftCost, DrafterNeeds, Event, RowView, levels
from outpace.drafters.composed import ASSUMED
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.learned.entries import Entries
from outpace.drafters.learned.picks import level_by_level
from outpace.errors import MemoryLimitError
from outpace.exact.drafts import Drafts
from outpace.exact.sampling import Chooser
from outpace.models.base import HostOutput

CATCH_UP = 256  # real entries of one row that wait unread, and that one call feeds
SHARED = 64  # unread entries of a beginning that rows share, from which on one of them reads it for all
BRANCH = 4
LEVELS = 6  # of a tree of fixed size; where the policy chooses, it says how many
DEEPEST = 8  # levels of a draft that stops at a floor


class Ask(NamedTuple):
    """One row's draft. Entry i of a row has the target's hidden states of position i and the token after it, i + 1."""

    row: int
    tokens: I32  # [n >= 1] of the real entries that the row lacks, the pending token last
    hidden_states: Any  # [n, T, H] of their positions, in the arrays of the target's backend
    nodes: int  # at most
    levels: int  # at most
    branch: int  # 1: a chain; else nodes that are expanded a level, and children of each
    chooser: Chooser | None = None  # of the next output token; None, or one without temperature: greedy
    floor: float = 0.0  # of the chance of a path to a node that has children


class EagleRuntime(Protocol):
    """A learned drafter's network with KV of its own, one row of it for each row of the target.

    Rows are made by the first call that feeds them. A call that raises leaves every row as it was. What is drafted for
    a row follows from the row's entries and its ask, whoever else is in the call.
    """

    ids: I32  # the target's token ids [D] of the draft vocabulary, ascending
    max_length: int  # entries that a row may have
    stops: bool  # whether a draft ends by its ask's floor

    def native_rows(
        self,
        layers: Sequence[int],
        branch: int,
        most_levels: int | None,
        fixed_levels: int,
        deepest: int,
        catch_up: int,
    ) -> _fast.native.EagleRows | None:
        """Drafts with this network for a drafter of these options; None: not in C++."""

    def feed(self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any]) -> None:
        """Append real entries: ``tokens[b]`` int32 [n_b], ``hidden_states[b]`` [n_b, T, H]. Raises MemoryLimitError."""

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        """Feed each row its last real entries, then draft: the rows end as after the feed.

        Trees as in EAGLE-2 (arXiv 2406.16858): every level expands the ``branch`` likeliest nodes by path probability,
        the whole keeps the ``nodes`` likeliest; ``confidence`` is the path probability. Children are the tokens of the
        largest logits or, where the chooser samples, of log q + g with g the request's noise for that output token:
        then a child's probability is its share of exp(log q + g) among the best 8 (or ``branch``, if that is more).
        Its rules are ignored, and its filters may be. Ties go to the lower token id. Raises MemoryLimitError.
        """

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any]) -> F32:
        """Append entries and give the logits float32 [B, D] after each row's last one: a draft level by level.

        ``hidden_states[b]`` None: one entry, ``tokens[b]`` int32 [1], that follows the row's last one of this same way,
        and has the network's own output in place of the target's hidden states. ``truncate`` drops such entries again.
        Raises MemoryLimitError.
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

    @property
    def bytes(self) -> int:
        """What all rows take now."""

    def check(self, rows: Sequence[int]) -> None:
        """Assert own invariants, given the only rows that may be there."""

    def close(self) -> None:
        """Give back memory. Calling twice is allowed."""


class EagleDrafter(ChainDrafter):
    """Trees (with ``branch`` 1: chains) of what ``network`` predicts. ``layers``: the target's, in the network's order.

    ``most_levels``: of a draft (None: as many as it is asked for). A row whose rules say what is allowed, or which
    samples under rejection, gets a chain that is drawn level by level, as from any draft model. What the network has
    still to read is kept in C++ beside a native one (``EagleRows``, which native steps draft with), else in Python.
    """

    retires = True

    def __init__(
        self,
        network: EagleRuntime,
        layers: Sequence[int],
        name: str,
        vocab: int,
        *,
        branch: int = BRANCH,
        most_levels: int | None = None,
    ) -> None:
        super().__init__(name, vocab, vocab)
        needed = tuple(sorted(set(layers)))
        self.needs = DrafterNeeds(hidden_layers=needed, draws=True)
        self.cost = DraftCost(levels=name, nodes=branch > 1)
        self._columns = [needed.index(layer) for layer in layers]
        self._network, self._branch, self._most = network, branch, most_levels
        native = network.native_rows(layers, branch, most_levels, LEVELS, DEEPEST, CATCH_UP)
        self.native, self.names = native, (name,)
        self._entries: Entries | _fast.native.EagleRows = native or Entries()

    # -- what became final -------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Take in real entries; only where many wait, some are fed."""
        for event in events:
            if event.hidden_states is None:
                continue
            known = self._entries.end(event.row) if event.row in self._entries else 0
            begin, end = max(known - event.start + 1, 0), min(len(event.hidden_states), len(event.tokens))
            if begin < end:  # copies: a view would keep a whole forward's states
                states = event.hidden_states.at(np.arange(begin, end, dtype=np.int32)).layers(self._columns).native
                self._entries.append(event.row, event.start - 1 + begin, event.tokens[begin:end], states)
        self._read_ahead([event.row for event in events if event.row in self._entries])

    def _read_ahead(self, rows: Sequence[int]) -> None:
        """Feed what waits beyond ``CATCH_UP``, in calls of at most so many entries a row; the last one is left."""
        many = [row for row in dict.fromkeys(rows) if self._entries.waiting(row) > CATCH_UP]
        while many:
            try:
                self._feed_some(many)
            except MemoryLimitError:
                self.release(many[-1])
            many = [row for row in many if row in self._entries and self._entries.waiting(row) > 1]

    def _feed_some(self, rows: Sequence[int]) -> None:
        """Feed unread entries of rows, all but the last and at most ``CATCH_UP`` of each. Raises MemoryLimitError."""
        for row in rows:
            self._settle(row)
        counts = [min(self._entries.waiting(row) - 1, CATCH_UP) for row in rows]
        given = [self._entries.unread(row, n) for row, n in zip(rows, counts, strict=True)]
        self._network.feed(rows, [tokens for tokens, _ in given], [states for _, states in given])
        for row, n in zip(rows, counts, strict=True):
            self._entries.has_read(row, n)

    def _settle(self, row: int) -> None:
        """Make the network's row what it is known to have read: an interrupted call leaves more."""
        if self._network.length(row) > (read := self._entries.read(row)):
            self._network.truncate(row, read)

    def _waiting(self, row: int) -> tuple[I32, Any]:
        """All that the row has still to read."""
        return self._entries.unread(row, self._entries.waiting(row))

    # -- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        views = [self._limited(view, size) for view, size in zip(rows, sizes.tolist(), strict=True)]
        alone = [i for i, view in enumerate(views) if level_by_level(view)]
        if not alone:
            return self._grow(views, sizes)
        others = [i for i in range(len(views)) if i not in alone]
        parts: list[tuple[list[int], Drafts]] = []
        chain = super().propose([views[i] for i in alone], sizes[alone])
        parts.append((alone, replace(chain, levels=chain.widths)))
        if others:
            parts.append((others, self._grow([views[i] for i in others], sizes[others])))
        if len(parts) > 1 and parts[1][1].confidence is not None:  # of a batch, all or none
            chain = parts[0][1]
            confidence = np.tile(ASSUMED ** (np.arange(chain.tokens.shape[1]) + 1.0), (len(alone), 1)).astype(
                np.float32
            )
            parts[0] = alone, replace(chain, confidence=confidence)
        return Drafts.join(parts, len(rows))

    def _limited(self, view: RowView, size: int) -> RowView:
        """The row with the levels that it is worth."""
        floor = view.floor if self._network.stops else 0.0
        depth = min(size, DEEPEST) if floor else size if view.depth is None else min(size, view.depth)
        most = LEVELS if self._most is None and self._branch > 1 and not view.adaptive else self._most
        depth = depth if most is None else min(depth, most)
        return view._replace(depth=depth, floor=floor)

    def _grow(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        """Trees for rows, as many of them as there is memory for."""
        depth = levels(rows, sizes).tolist()
        asked = [i for i, view in enumerate(rows) if depth[i] and self._ready(view.row, depth[i])]
        while asked:
            asks = [
                Ask(row, *self._waiting(row), int(sizes[i]), depth[i], self._branch, rows[i].chooser, rows[i].floor)
                for i, row in ((i, rows[i].row) for i in asked)
            ]
            try:
                drafts = self._network.draft(asks)
            except MemoryLimitError:
                self._no_room(rows[asked.pop()])
                continue
            for ask in asks:
                self._entries.has_read(ask.row, len(ask.tokens))
            taken = np.array([ask.levels for ask in asks], np.int32) if drafts.levels is None else drafts.levels
            return replace(drafts, sources=(self.name,), levels=taken).among(asked, len(rows))
        nothing: F32 = np.zeros((len(rows), 0), np.float32)
        none = np.zeros(len(rows), np.int32)
        return replace(Drafts.empty(len(rows)), confidence=nothing, sources=(self.name,), levels=none)

    def _ready(self, row: int, more: int) -> bool:
        """Whether the row has entries to feed, at most ``CATCH_UP`` of them, and room for ``more`` behind them."""
        if row not in self._entries:
            return False
        self._settle(row)
        if not self._entries.waiting(row):
            if not self._entries.unread_last(row):
                return False
            self._settle(row)
        return self._entries.read(row) + self._entries.waiting(row) + more <= self._network.max_length

    def _begin(self, view: RowView) -> I32:
        return self._waiting(view.row)[0] if self._ready(view.row, 1) else np.zeros(0, np.int32)

    def _fits(self, view: RowView, n: int) -> bool:
        return 0 < n <= self._network.max_length - self._network.length(view.row)

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[HostOutput, I32]:
        given = [self._waiting(row)[1] if self._entries.waiting(row) else None for row in rows]
        found = self._network.extend(rows, tokens, given)
        for row in rows:
            self._entries.has_read(row, self._entries.waiting(row))
        logits = np.full((len(rows), self._vocab), -np.inf, np.float32)
        logits[:, self._network.ids] = found
        at = np.arange(len(rows), dtype=np.int32)
        return HostOutput(at, logits), at

    def _no_room(self, view: RowView) -> None:
        self.release(view.row)

    # -- rows --------------------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, n: int) -> None:
        self.release(dst)
        if src not in self._entries:
            return
        if self._entries.waiting(src) > 1 and n - 1 - self._entries.read(src) > SHARED:
            self._feed_some([src])  # so that both have it from one forward; the last says how a draft begins
        self._settle(src)
        self._entries.fork(src, dst, n - 1)  # entry n - 2 has the last of n tokens
        if read := self._entries.read(dst):
            self._network.fork(src, dst, read)

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        self._entries.retire(row)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._entries.release(row)
        self._network.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._network.growth(row, positions)

    @property
    def bytes(self) -> int:
        return self._network.bytes

    def check(self, rows: Sequence[int]) -> None:
        own = self._entries.rows()
        assert set(own) <= set(rows), f"rows {set(own) - set(rows)} were never released"
        for row in own:
            assert self._network.length(row) >= self._entries.read(row), f"row {row} lost entries"
            assert self._entries.waiting(row) <= CATCH_UP, f"row {row}: {self._entries.waiting(row)} entries wait"
        self._network.check(own)

    def close(self) -> None:
        self._network.close()
        self._entries, self.native = Entries(), None  # which keep the network's weights
