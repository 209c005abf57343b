"""Drafters whose networks read the target's hidden states: what each has read of a row, and how it catches up.

Entry i of a row has the target's hidden states of position i and the token that follows it, i + 1. Where hidden states
never came (a prefix that another drafter's row computed), entries are left out, which costs acceptance alone. A method
(EAGLE, blocks, heads) is a ``Network``, and a backend brings the forwards of it. Beside a native target steps draft in
C++ (``_native.LearnedRows``), which counts its entries as it is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from outpace import _fast
from outpace.common.arrays import F32, I32
from outpace.drafters.base import DraftCost, DrafterNeeds, Event, RowView, level_by_level, levels
from outpace.drafters.forward.chain import ChainDrafter
from outpace.errors import MemoryLimitError
from outpace.exact.drafts import ASSUMED, Drafts
from outpace.exact.sampling import Chooser
from outpace.models.base import HostOutput

CATCH_UP = 256  # entries of one row that wait unread, and that one call feeds
SHARED = 64  # unread entries of a beginning that rows share, from which on one of them reads it for all
BRANCH = 4
LEVELS = 6  # of a tree of fixed size; where the policy chooses, it says how many
DEEPEST = 8  # levels of a draft that stops at a floor


class Ask(NamedTuple):
    """One row's draft: at most ``nodes`` in ``levels`` levels after its pending token."""

    row: int
    tokens: I32  # [n] of the entries that the network has still to read, the pending token last; eager: none
    hidden_states: Any  # [n, T, H] of their positions, in the arrays of the target's backend
    nodes: int
    levels: int
    branch: int  # of a network that is stepwise: 1, a chain; else nodes that are expanded a level, and children of each
    chooser: Chooser | None = None  # of the next output token; None, or one without temperature: greedy
    floor: float = 0.0  # of the chance of a path to a node that has children
    pending: int = -1  # the pending token
    position: int = 0  # where it stands


class Predicted(NamedTuple):
    """What a network itself predicts in place of the target's hidden states, in the arrays of its backend."""

    features: Any


class KV:
    """Keys and values of a network's rows, one position an entry; here: of a network without any.

    Rows are named by the target's, and made when they are first read for. What raises MemoryLimitError leaves every row
    as it was.
    """

    def length(self, row: int) -> int:
        """Positions of the row; 0 for one that is not there."""
        return 0

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n positions."""

    def fork(self, src: int, dst: int, n: int) -> None:
        """Make ``dst``, which is not there, of the first n positions of ``src``. Raises MemoryLimitError."""

    def release(self, row: int) -> None:
        """Forget the row, if it is there."""

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many positions; it may not be there yet."""
        return 0

    @property
    def bytes(self) -> int:
        """What all rows take now."""
        return 0

    def check(self, rows: Sequence[int]) -> None:
        """Assert own invariants, given the only rows that may be there."""

    def close(self) -> None:
        """Give back memory. Calling twice is allowed."""


class Network:
    """All that a method brings on a backend. A call that raises leaves every row as it was; what a row gets follows
    from its entries and its ask, whoever else is in the call (in torch, up to rounding).

    ``stepwise``: a level of a draft takes a forward. ``eager``: it reads entries as they come, each at its own
    position; else they wait, since a draft reads the last ones. ``latest``: of a row the last entry alone counts, and
    it keeps nothing. ``draws``: it can ``extend``.
    """

    ids: I32  # the target's token ids [D] of the draft vocabulary, ascending
    kv: KV = KV()
    max_length: int = 1 << 30  # entries that a row may have; eager: positions
    most_levels: int | None = None  # of a draft
    stepwise: bool = True
    eager: bool = False
    latest: bool = False
    draws: bool = True
    stops: bool = False  # whether a draft ends by its ask's floor

    def native_rows(
        self, layers: Sequence[int], branch: int, most_levels: int | None, catch_up: int
    ) -> _fast.native.LearnedRows | None:
        """Drafts with this network for a drafter of these options; None: not in C++."""
        return None

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        """Append entries: ``tokens[b]`` int32 [n_b], ``hidden_states[b]`` [n_b, T, H], ``positions[b]`` int32 [n_b], of
        which only an eager one needs to know. Raises MemoryLimitError."""
        raise NotImplementedError

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        """Feed each row its last entries, then draft: the rows end as after the feed.

        Nodes are those of the largest path probability, ``confidence``. Where the chooser samples, candidates are those
        of the largest log q + g, with g the request's noise for that output token; then a candidate's probability is
        its share of exp(log q + g) among the best (``picks.chosen``). Rules are ignored, and filters may be. Ties go to
        the lower token id. Raises MemoryLimitError, NotFiniteError.
        """
        raise NotImplementedError

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        """A draft level by level: logits float32 [B, D] after ``tokens[b]`` int32 [n_b], and what is ``given`` with the
        one token that is drafted from them.

        ``given[b]`` at first: hidden states [n_b, T, H] of entries that are appended; to an eager one, the position of
        the pending token. What is appended is dropped by ``kv.truncate``. Raises MemoryLimitError.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give back memory. Calling twice is allowed."""
        self.kv.close()


class Entries(_fast.native.Entries):
    """Entries whose hidden states stay arrays of the target's backend: numpy, or torch tensors on their device."""

    def __init__(self) -> None:
        super().__init__(0)
        self._states: dict[int, Any] = {}  # [k, T, h] of each row's last entries that are kept

    def append(self, row: int, first: int, tokens: I32, states: Any) -> None:
        super().append(row, first, tokens, None)
        self._states[row] = _joined(self._states[row], states) if row in self._states else states

    def states(self, row: int, n: int, layers: int) -> Any:
        waiting = self._states[row][self.kept(row) - self.waiting(row) :]
        return waiting[:n]

    def has_read(self, row: int, n: int) -> None:
        super().has_read(row, n)
        self._trim(row)

    def fork(self, src: int, dst: int, before: int) -> None:
        super().fork(src, dst, before)
        if src in self._states:
            self._states[dst] = self._states[src][: self.kept(dst)]

    def retire(self, row: int) -> None:
        super().retire(row)
        if row in self:
            self._trim(row)

    def release(self, row: int) -> None:
        super().release(row)
        self._states.pop(row, None)

    def _trim(self, row: int) -> None:
        if not self.kept(row):
            self._states.pop(row, None)
        elif len(self._states[row]) > self.kept(row):
            self._states[row] = self._states[row][-self.kept(row) :]


def _joined(first: Any, then: Any) -> Any:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, then])
    import torch

    return torch.cat([first, then])


class LearnedDrafter(ChainDrafter):
    """Drafts of what ``network`` predicts. ``layers``: the target's, in the network's order.

    ``most_levels``: of a draft (None: as many as it is asked for). A row whose rules say what is allowed, or which
    samples under rejection, gets a chain that is drawn level by level, as from any draft model.
    """

    retires = True

    def __init__(
        self,
        network: Network,
        layers: Sequence[int],
        name: str,
        vocab: int,
        *,
        branch: int = BRANCH,
        most_levels: int | None = None,
    ) -> None:
        super().__init__(name, vocab, vocab)
        needed = tuple(sorted(set(layers)))
        self.needs = DrafterNeeds(hidden_layers=needed, draws=network.draws)
        self.cost = DraftCost(levels=name, nodes=True) if network.stepwise else DraftCost()
        self._columns = [needed.index(layer) for layer in layers]
        self._network, self._branch = network, branch
        self._most = network.most_levels if most_levels is None else most_levels
        self._given: dict[int, Any] = {}  # of rows that are drafted level by level: see ``Network.extend``
        native = network.native_rows(layers, branch, self._most, CATCH_UP)
        self.native, self.names = native, (name,)
        self._entries: _fast.native.Entries = Entries() if native is None else native.entries

    # -- what became final -------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Take in entries; an eager network reads them, of another's only those beyond ``CATCH_UP``."""
        entries, network = self._entries, self._network
        for event in events:
            if event.hidden_states is None:
                continue
            end = min(len(event.hidden_states), len(event.tokens))
            if network.eager:
                end = min(end, network.max_length - event.start + 1)
            if network.latest:
                entries.release(event.row)
            begin = max(entries.end(event.row) - event.start + 1 if event.row in entries else 0, 0)
            begin = max(begin, end - 1) if network.latest else begin
            if begin < end:  # copies: a view would keep a whole forward's states
                states = event.hidden_states.at(np.arange(begin, end, dtype=np.int32)).layers(self._columns).native
                entries.append(event.row, event.start - 1 + begin, event.tokens[begin:end], states)
        self._read_ahead([event.row for event in events if event.row in entries])

    def _read_ahead(self, rows: Sequence[int]) -> None:
        """Feed what waits, in calls of at most ``CATCH_UP`` entries a row; the last one is left to a draft."""
        wait, left = (0, 0) if self._network.eager else (CATCH_UP, 1)
        many = [row for row in dict.fromkeys(rows) if self._entries.waiting(row) > wait]
        while many:
            try:
                self._read(many, left)
            except MemoryLimitError:
                self.release(many[-1])
            many = [row for row in many if row in self._entries and self._entries.waiting(row) > left]

    def _read(self, rows: Sequence[int], left: int) -> None:
        """Feed unread entries of rows, all but ``left`` and at most ``CATCH_UP`` of each. Raises MemoryLimitError."""
        for row in rows:
            self._settle(row)
        counts = [min(self._entries.waiting(row) - left, CATCH_UP) for row in rows]
        tokens, positions = zip(*map(self._entries.unread, rows, counts), strict=True)
        self._network.feed(rows, tokens, list(map(self._states, rows, counts)), positions)
        for row, n in zip(rows, counts, strict=True):
            self._entries.has_read(row, n)
            if not left:
                self._entries.retire(row)

    def _settle(self, row: int) -> None:
        """Make the network's row what it is known to have read: an interrupted call leaves more."""
        if self._network.kv.length(row) > (read := self._entries.read(row)):
            self._network.kv.truncate(row, read)

    def _states(self, row: int, n: int) -> Any:
        return self._entries.states(row, n, len(self._columns))

    # -- drafting ----------------------------------------------------------------------------------------------------

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        views = [self._limited(view, size) for view, size in zip(rows, sizes.tolist(), strict=True)]
        alone = [i for i, view in enumerate(views) if self.needs.draws and level_by_level(view)]
        if not alone:
            return self._grow(views, sizes)
        others = [i for i in range(len(views)) if i not in alone]
        chain = super().propose([views[i] for i in alone], sizes[alone])
        self._given.clear()
        if self._network.stepwise:
            chain = replace(chain, levels=chain.widths)
        if others or not self._network.stepwise:  # of a batch, all or none
            confidence = ASSUMED ** (np.arange(chain.tokens.shape[1]) + 1.0)
            chain = replace(chain, confidence=np.tile(confidence, (len(alone), 1)).astype(np.float32))
        parts = [(alone, chain)]
        if others:
            parts.append((others, self._grow([views[i] for i in others], sizes[others])))
        return Drafts.join(parts, len(rows))

    def _limited(self, view: RowView, size: int) -> RowView:
        """The row with the levels that it is worth."""
        floor = view.floor if self._network.stops else 0.0
        depth = min(size, DEEPEST) if floor else size if view.depth is None else min(size, view.depth)
        most = LEVELS if self._most is None and self._branch > 1 and not view.adaptive else self._most
        return view._replace(depth=depth if most is None else min(depth, most), floor=floor)

    def _grow(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        """Trees for rows, as many of them as there is memory for."""
        depth = levels(rows, sizes).tolist()
        where = [i for i, view in enumerate(rows) if depth[i] and self._ready(view, depth[i])]
        while where:
            asks = [self._ask(rows[i], int(sizes[i]), depth[i]) for i in where]
            try:
                drafts = self._network.draft(asks)
            except MemoryLimitError:
                self._no_room(rows[where.pop()])
                continue
            for ask in asks:
                self._entries.has_read(ask.row, len(ask.tokens))
            drafts = replace(drafts, sources=(self.name,))
            if self._network.stepwise and drafts.levels is None:
                drafts = replace(drafts, levels=np.array([ask.levels for ask in asks], np.int32))
            return drafts.among(where, len(rows))
        none = np.zeros(len(rows), np.int32)
        return Drafts(
            np.zeros((len(rows), 0), np.int32), none, confidence=np.zeros((len(rows), 0), np.float32),
            sources=(self.name,), levels=none if self._network.stepwise else None,
        )  # fmt: skip

    def _ask(self, view: RowView, nodes: int, depth: int) -> Ask:
        n = self._entries.waiting(view.row)
        chooser = None if view.acceptance == "rejection" else view.chooser  # whose drafts never read the choice's noise
        return Ask(
            view.row, self._entries.unread(view.row, n)[0], self._states(view.row, n) if n else None, nodes, depth,
            self._branch, chooser, view.floor, int(view.tokens[-1]), len(view.tokens) - 1,
        )  # fmt: skip

    def _ready(self, view: RowView, more: int) -> bool:
        """Whether the row has entries to feed or, eager, was read for, and room for ``more`` levels."""
        entries, network, row = self._entries, self._network, view.row
        if row not in entries:
            return False
        self._settle(row)
        if not network.eager and not entries.waiting(row):
            if not entries.unread_last(row):
                return False
            self._settle(row)
        if network.latest:
            return entries.end(row) == len(view.tokens) - 1
        used = len(view.tokens) if network.eager else entries.read(row) + entries.waiting(row)
        return entries.end(row) > 0 and used + more <= network.max_length

    def _begin(self, view: RowView, asked: int) -> I32:
        eager = self._network.eager
        if not self._ready(view, view.depth or 1 if eager else 1):
            return np.zeros(0, np.int32)
        if eager:
            self._given[view.row] = len(view.tokens) - 1
            return np.array(view.tokens[-1:], np.int32)
        n = self._entries.waiting(view.row)
        self._given[view.row] = self._states(view.row, n)
        return self._entries.unread(view.row, n)[0]

    def _fits(self, view: RowView, n: int) -> bool:
        return n > 0 and (self._network.eager or n <= self._network.max_length - self._network.kv.length(view.row))

    def _feed(self, rows: list[int], tokens: list[I32]) -> tuple[HostOutput, I32]:
        logits, given = self._network.extend(rows, tokens, [self._given[row] for row in rows])
        self._given |= zip(rows, given, strict=True)
        for row in rows:
            self._entries.has_read(row, self._entries.waiting(row))
        every = np.full((len(rows), self._vocab), -np.inf, np.float32)
        every[:, self._network.ids] = logits
        at = np.arange(len(rows), dtype=np.int32)
        return HostOutput(at, every), at

    def _no_room(self, view: RowView) -> None:
        self.release(view.row)

    # -- rows --------------------------------------------------------------------------------------------------------

    def fork(self, src: int, dst: int, n: int) -> None:
        self.release(dst)
        entries = self._entries
        if src not in entries:
            return
        if entries.waiting(src) > 1 and n - 1 - entries.read(src) > SHARED:
            self._read([src], 1)  # so that both have it from one forward; the last says how a draft begins
        self._settle(src)
        entries.fork(src, dst, n - 1)  # entry n - 2 has the last of n tokens
        if read := entries.read(dst):
            self._network.kv.fork(src, dst, read)

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        self._entries.retire(row)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._entries.release(row)
        self._network.kv.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self._network.kv.growth(row, min(positions, self._network.max_length))

    @property
    def bytes(self) -> int:
        return self._network.kv.bytes

    def check(self, rows: Sequence[int]) -> None:
        entries, kv = self._entries, self._network.kv
        known = entries.rows()
        assert set(known) <= set(rows), f"rows {set(known) - set(rows)} were never released"
        for row in known:
            assert self._network.latest or kv.length(row) >= entries.read(row), f"row {row} lost entries"
            assert entries.waiting(row) <= CATCH_UP, f"row {row}: {entries.waiting(row)} entries wait"
        kv.check(known)

    def close(self) -> None:
        self._network.close()
        self._entries, self.native = Entries(), None  # which keep the network's weights
