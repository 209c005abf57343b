"""``eagle:PATH``: one small layer over the target's hidden states drafts chains and trees (EAGLE-3, arXiv 2503.01840).

Entry i of a row has the target's taps of position i and the token that follows it, i + 1; its output predicts token
i + 2. So a row of L committed tokens has L - 1 real entries, and what the last one says is a draft's first level. Where
taps never came (a prefix that another drafter's row computed), the entries are left out: attention knows distances, not
places, so those behind them only think that the text is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outpace.arrays import I32
from outpace.drafters.base import DraftCost, DrafterNeeds, Event, RowView, levels
from outpace.drafters.composed import ASSUMED
from outpace.drafters.forward.chain import ChainDrafter
from outpace.drafters.learned.head import Ask, Head
from outpace.drafters.learned.picks import level_by_level
from outpace.errors import MemoryLimitError
from outpace.exact.drafts import Drafts
from outpace.models.base import HostOutput

CATCH_UP = 256  # real entries of one row that wait unread, and that one call feeds
BRANCH = 4
LEVELS = 6  # of a tree of fixed size; where the policy chooses, it says how many


@dataclass(slots=True)
class _Piece:
    """Real entries ``start`` .. that follow one another: their tokens int32 [n] and taps [n, T, H]."""

    start: int
    tokens: I32
    taps: Any

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def part(self, first: int, last: int) -> _Piece:
        """Entries ``first`` to ``last - 1``, counted from its own first."""
        return _Piece(self.start + first, self.tokens[first:last], self.taps[first:last])


@dataclass(slots=True)
class _Row:
    spans: list[tuple[int, int]] = field(default_factory=list)  # entries that the head has, [first, end), ascending
    unread: list[_Piece] = field(default_factory=list)  # those that it lacks, ascending
    last: _Piece | None = None  # the last one that it has, to be fed again where nothing is unread

    @property
    def read(self) -> int:
        """Entries that the head has."""
        return sum(end - first for first, end in self.spans)

    @property
    def end(self) -> int:
        """The entry after all that are known."""
        return self.unread[-1].end if self.unread else self.spans[-1][1] if self.spans else 0

    @property
    def waiting(self) -> int:
        return sum(len(piece.tokens) for piece in self.unread)

    def take(self, n: int) -> list[_Piece]:
        """The first ``n`` unread entries, which stay unread."""
        taken: list[_Piece] = []
        for piece in self.unread:
            if n <= 0:
                break
            taken.append(piece.part(0, min(n, len(piece.tokens))))
            n -= len(piece.tokens)
        return taken

    def has_read(self, pieces: Sequence[_Piece]) -> None:
        """The head has these now, which were the first that were unread."""
        for piece in pieces:
            if self.spans and self.spans[-1][1] == piece.start:
                self.spans[-1] = (self.spans[-1][0], piece.end)
            else:
                self.spans.append((piece.start, piece.end))
            first, n = self.unread[0], len(piece.tokens)
            self.unread[:1] = [first.part(n, len(first.tokens))] if n < len(first.tokens) else []
        self.last = pieces[-1].part(len(pieces[-1].tokens) - 1, len(pieces[-1].tokens))

    def unread_last(self) -> bool:
        """Make the last entry unread again; whether that can be done."""
        if self.last is None or not self.spans or self.spans[-1][1] != self.last.end:
            return False
        first, end = self.spans[-1]
        self.spans[-1:] = [(first, end - 1)] if end - 1 > first else []
        self.unread.insert(0, self.last)
        return True


class EagleDrafter(ChainDrafter):
    """Trees (with ``branch`` 1: chains) of what ``head`` predicts. ``taps``: layers of the target in the head's order.

    ``most_levels``: of a draft (None: as many as it is asked for). A row whose rules say what is allowed, or which
    samples under rejection, gets a chain that is drawn level by level, as from any draft model.
    """

    retires = True

    def __init__(
        self,
        head: Head,
        taps: Sequence[int],
        name: str,
        vocab: int,
        *,
        branch: int = BRANCH,
        most_levels: int | None = None,
    ) -> None:
        super().__init__(name, vocab, vocab)
        layers = tuple(sorted(set(taps)))
        self.needs = DrafterNeeds(taps=layers, draws=True)
        self.cost = DraftCost(levels=name, nodes=branch > 1)
        self._columns = [layers.index(layer) for layer in taps]
        self._head, self._branch, self._most = head, branch, most_levels
        self._rows: dict[int, _Row] = {}

    # -- what became final -------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Take in real entries; only where many wait, some are fed."""
        for event in events:
            if event.taps is None:
                continue
            row, first = self._rows.setdefault(event.row, _Row()), event.start - 1
            begin, end = max(row.end - first, 0), min(len(event.taps), len(event.tokens))
            if begin < end:  # copies: a view would keep a whole forward's states
                taps = event.taps.at(np.arange(begin, end, dtype=np.int32)).layers(self._columns).native
                row.unread.append(_Piece(first + begin, np.array(event.tokens[begin:end], np.int32), taps))
        self._read_ahead([event.row for event in events if event.row in self._rows])

    def _read_ahead(self, rows: Sequence[int]) -> None:
        """Feed what waits beyond ``CATCH_UP``, in calls of at most so many entries a row; the last one is left."""
        many = [row for row in dict.fromkeys(rows) if self._rows[row].waiting > CATCH_UP]
        while many:
            try:
                self._feed_some(many)
            except MemoryLimitError:
                self.release(many[-1])
            many = [row for row in many if row in self._rows and self._rows[row].waiting > 1]

    def _feed_some(self, rows: Sequence[int]) -> None:
        """Feed unread entries of rows, all but the last and at most ``CATCH_UP`` of each. Raises MemoryLimitError."""
        taken = [self._settled(row).take(min(self._rows[row].waiting - 1, CATCH_UP)) for row in rows]
        self._head.feed(rows, *_joined(taken))
        for row, pieces in zip(rows, taken, strict=True):
            self._rows[row].has_read(pieces)

    def _settled(self, row: int) -> _Row:
        """The row, once its head has what it is known to have read: an interrupted call leaves more."""
        its = self._rows[row]
        if self._head.length(row) > its.read:
            self._head.truncate(row, its.read)
        return its

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
            taken = [list(self._rows[rows[i].row].unread) for i in asked]
            asks = [
                Ask(rows[i].row, tokens, taps, int(sizes[i]), depth[i], self._branch, rows[i].chooser)
                for i, tokens, taps in zip(asked, *_joined(taken), strict=True)
            ]
            try:
                drafts = self._head.draft(asks)
            except MemoryLimitError:
                self._no_room(rows[asked.pop()])
                continue
            for i, pieces in zip(asked, taken, strict=True):
                self._rows[rows[i].row].has_read(pieces)
            return replace(drafts, sources=(self.name,), levels=np.array([ask.levels for ask in asks], np.int32)).among(
                asked, len(rows)
            )
        return replace(Drafts.empty(len(rows)), levels=np.zeros(len(rows), np.int32))

    def _ready(self, row: int, more: int) -> bool:
        """Whether the row has entries to feed, at most ``CATCH_UP`` of them, and room for ``more`` behind them."""
        if row not in self._rows:
            return False
        its = self._settled(row)
        if not its.unread:
            if not its.unread_last():
                return False
            self._head.truncate(row, its.read)
        return its.read + its.waiting + more <= self._head.max_length

    def _begin(self, view: RowView) -> I32:
        if not self._ready(view.row, 1):
            return np.zeros(0, np.int32)
        return np.concatenate([piece.tokens for piece in self._rows[view.row].unread])

    def _fits(self, view: RowView, n: int) -> bool:
        return 0 < n <= self._head.max_length - self._head.length(view.row)

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[HostOutput, I32]:
        real = [bool(self._rows[row].unread) for row in rows]
        given = [_together(self._rows[row].unread).taps if its else None for row, its in zip(rows, real, strict=True)]
        said = self._head.extend(rows, tokens, given)
        for row, its in zip(rows, real, strict=True):
            if its:
                self._rows[row].has_read(list(self._rows[row].unread))
        logits = np.full((len(rows), self._vocab), -np.inf, np.float32)
        logits[:, self._head.ids] = said
        at = np.arange(len(rows), dtype=np.int32)
        return HostOutput(at, logits), at

    def _no_room(self, view: RowView) -> None:
        self.release(view.row)

    # -- rows --------------------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, n: int) -> None:
        self.release(dst)
        source, known = self._rows.get(src), n - 1  # entry n - 2 has the last of n tokens
        if source is None:
            return
        if source.waiting > 1:  # so that both have it from one forward; the last entry says what a draft begins with
            self._feed_some([src])
        self._settled(src)
        spans = [(first, min(end, known)) for first, end in source.spans if first < known]
        unread = [p.part(0, min(len(p.tokens), known - p.start)) for p in source.unread if p.start < known]
        its = _Row(spans, unread, source.last)
        if its.read:
            self._head.fork(src, dst, its.read)
        self._rows[dst] = its

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        if row in self._rows:
            self._rows[row].last = None

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._rows.pop(row, None)
        self._head.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._head.growth(row, positions)

    @property
    def bytes(self) -> int:
        return self._head.bytes

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        for row, its in self._rows.items():
            assert self._head.length(row) >= its.read, f"row {row} lost entries"
            assert its.waiting <= CATCH_UP, f"row {row}: {its.waiting} entries wait"
        self._head.check(list(self._rows))

    def close(self) -> None:
        self._head.close()


def _together(pieces: Sequence[_Piece]) -> _Piece:
    """Entries of several pieces as if they stood side by side."""
    if len(pieces) == 1:
        return pieces[0]
    taps = [piece.taps for piece in pieces]
    if isinstance(taps[0], np.ndarray):
        joined = np.concatenate(taps)
    else:
        import torch

        joined = torch.cat(taps)
    return _Piece(pieces[0].start, np.concatenate([piece.tokens for piece in pieces]), joined)


def _joined(rows: Sequence[Sequence[_Piece]]) -> tuple[list[I32], list[Any]]:
    """Tokens int32 [n] and taps [n, T, H] of each row's pieces."""
    whole = [_together(pieces) for pieces in rows]
    return [its.tokens for its in whole], [its.taps for its in whole]
