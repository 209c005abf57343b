"""``eagle:PATH``: one small layer over the target's hidden states drafts chains and trees (EAGLE-3, arXiv 2503.01840).

Entry i of a row has the target's taps of position i and the token that follows it, i + 1; its output predicts token
i + 2. So a row of L committed tokens has L - 1 real entries, and what the last one says is a draft's first level. Where
taps never came (a prefix that another drafter's row computed), the entries are left out: attention knows distances, not
places, so those behind them only think that the text is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outpace.arrays import F32, I32
from outpace.drafters.base import DraftCost, DrafterNeeds, Event, RowView, levels
from outpace.drafters.composed import ASSUMED
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.learned.entries import Entries, HostEntries
from outpace.drafters.learned.head import Ask, Head
from outpace.drafters.learned.native_head import NativeHead
from outpace.drafters.learned.picks import level_by_level
from outpace.errors import MemoryLimitError
from outpace.exact.drafts import Drafts
from outpace.models.base import HostOutput

CATCH_UP = 256  # real entries of one row that wait unread, and that one call feeds
SHARED = 64  # unread entries of a beginning that rows share, from which on one of them reads it for all
BRANCH = 4
LEVELS = 6  # of a tree of fixed size; where the policy chooses, it says how many


class EagleDrafter(ChainDrafter):
    """Trees (with ``branch`` 1: chains) of what ``head`` predicts. ``taps``: layers of the target in the head's order.

    ``most_levels``: of a draft (None: as many as it is asked for). A row whose rules say what is allowed, or which
    samples under rejection, gets a chain that is drawn level by level, as from any draft model. ``entries``: who keeps
    what the head has still to read; None: C++ beside a native head, which whole steps then draft with, else Python.
    """

    retires = True
    renew: Callable[[Head], bool] | None = None  # gives the head newer weights, where there are any; whether there were

    def __init__(
        self,
        head: Head,
        taps: Sequence[int],
        name: str,
        vocab: int,
        *,
        branch: int = BRANCH,
        most_levels: int | None = None,
        entries: Entries | None = None,
    ) -> None:
        super().__init__(name, vocab, vocab)
        layers = tuple(sorted(set(taps)))
        self.needs = DrafterNeeds(taps=layers, draws=True)
        self.cost = DraftCost(levels=name, nodes=branch > 1)
        self._columns = [layers.index(layer) for layer in taps]
        self._head, self._branch, self._most = head, branch, most_levels
        if entries is None and isinstance(head, NativeHead):
            self.lookup = head.entries(taps, branch, most_levels, LEVELS, CATCH_UP)
            self.names = (name,)
            entries = self.lookup
        self._entries: Entries = HostEntries() if entries is None else entries

    # -- what became final -------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Take in real entries; only where many wait, some are fed."""
        for event in events:
            if event.taps is None:
                continue
            known = self._entries.end(event.row) if event.row in self._entries else 0
            begin, end = max(known - event.start + 1, 0), min(len(event.taps), len(event.tokens))
            if begin < end:  # copies: a view would keep a whole forward's states
                taps = event.taps.at(np.arange(begin, end, dtype=np.int32)).layers(self._columns).native
                self._entries.append(event.row, event.start - 1 + begin, event.tokens[begin:end], taps)
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
        self._head.feed(rows, [tokens for tokens, _ in given], [taps for _, taps in given])
        for row, n in zip(rows, counts, strict=True):
            self._entries.has_read(row, n)

    def _settle(self, row: int) -> None:
        """Make the head's row what it is known to have read: an interrupted call leaves more."""
        if self._head.length(row) > (read := self._entries.read(row)):
            self._head.truncate(row, read)

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
            said = np.tile(ASSUMED ** (np.arange(chain.tokens.shape[1]) + 1.0), (len(alone), 1)).astype(np.float32)
            parts[0] = alone, replace(chain, confidence=said)
        return Drafts.join(parts, len(rows))

    def _limited(self, view: RowView, size: int) -> RowView:
        """The row with the levels that it is worth."""
        depth = size if view.depth is None else min(size, view.depth)
        most = LEVELS if self._most is None and self._branch > 1 and not view.adaptive else self._most
        depth = depth if most is None else min(depth, most)
        return view if depth == view.depth else view._replace(depth=depth)

    def _grow(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        """Trees for rows, as many of them as there is memory for."""
        depth = levels(rows, sizes).tolist()
        asked = [i for i, view in enumerate(rows) if depth[i] and self._ready(view.row, depth[i])]
        while asked:
            asks = [
                Ask(row, *self._waiting(row), int(sizes[i]), depth[i], self._branch, rows[i].chooser)
                for i, row in ((i, rows[i].row) for i in asked)
            ]
            try:
                drafts = self._head.draft(asks)
            except MemoryLimitError:
                self._no_room(rows[asked.pop()])
                continue
            for ask in asks:
                self._entries.has_read(ask.row, len(ask.tokens))
            taken = np.array([ask.levels for ask in asks], np.int32)
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
        return self._entries.read(row) + self._entries.waiting(row) + more <= self._head.max_length

    def _begin(self, view: RowView) -> I32:
        return self._waiting(view.row)[0] if self._ready(view.row, 1) else np.zeros(0, np.int32)

    def _fits(self, view: RowView, n: int) -> bool:
        return 0 < n <= self._head.max_length - self._head.length(view.row)

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[HostOutput, I32]:
        given = [self._waiting(row)[1] if self._entries.waiting(row) else None for row in rows]
        said = self._head.extend(rows, tokens, given)
        for row in rows:
            self._entries.has_read(row, self._entries.waiting(row))
        logits = np.full((len(rows), self._vocab), -np.inf, np.float32)
        logits[:, self._head.ids] = said
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
            self._head.fork(src, dst, read)

    def reload(self) -> bool:
        """See ``Drafter.reload``. What rows have read stays as the old weights made it: it fits nearly as well."""
        return self.renew is not None and self.renew(self._head)

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        self._entries.retire(row)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._entries.release(row)
        self._head.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._head.growth(row, positions)

    @property
    def bytes(self) -> int:
        return self._head.bytes

    def check(self, rows: Sequence[int]) -> None:
        own = self._entries.rows()
        assert set(own) <= set(rows), f"rows {set(own) - set(rows)} were never released"
        for row in own:
            assert self._head.length(row) >= self._entries.read(row), f"row {row} lost entries"
            assert self._entries.waiting(row) <= CATCH_UP, f"row {row}: {self._entries.waiting(row)} entries wait"
        self._head.check(own)

    def close(self) -> None:
        self._head.close()
        self._entries, self.lookup = HostEntries(), None  # which keep the network's weights
