"""Recurrent states of rows as torch tensors, which can be cut back to any of the last few tokens without a copy.

The rules are the native runtime's (``docs/recurrent.md``): a row keeps its states at a base, and of the tokens behind
it records of what brings a state over them, which the next forward replays. Tensors are not written any more once a row
has them, so that rows and snapshots share them by reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from outpace.common.arrays import I32
from outpace.models.base import Batch
from outpace.models.torch.upload import uploaded

KEPT = 64  # most tokens that a row keeps behind its base
LEAST = 8  # records that are counted for at least
SNAPSHOTS = 16  # states that snapshots keep at most; the oldest goes first
EVERY = 2048  # positions between those of a prompt that takes several forwards


@dataclass(frozen=True, slots=True)
class StateShape:
    """Of ``layers`` recurrent layers: their convolution's ``taps`` and ``channels``, and of delta nets and state spaces
    the heads' states, ``key_dim`` x ``value_dim`` for each of ``value_heads``."""

    layers: int
    taps: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def record(self) -> tuple[int, int, int, int]:
        """A token's numbers a layer: inputs of the convolution, keys, updates, decays."""
        heads = self.value_heads
        return self.channels, self.key_heads * self.key_dim, heads * self.value_dim, heads

    @property
    def state(self) -> tuple[int, ...]:
        return self.layers, self.value_heads, self.key_dim, self.value_dim

    @property
    def bytes(self) -> int:
        """Of a row's states."""
        return 4 * int(np.prod(self.state))

    def records_bytes(self, tokens: int) -> int:
        """Of the records of so many tokens behind the base, and of the inputs before them."""
        return 4 * self.layers * sum(self.record) * (min(max(tokens, LEAST), KEPT) + self.taps - 1)


@dataclass(frozen=True, slots=True)
class _Row:
    base: int
    state: Tensor | None  # float32 [layers, value_heads, key_dim, value_dim]; None: zeros
    records: Tensor  # float32 [layers, taps - 1 + tokens, numbers]; before the first token's those of inputs alone
    reads: bool = False  # its last step was over a prompt, after which it had a snapshot


@dataclass(frozen=True, slots=True)
class _Snapshot:
    row: int
    kept: bool  # it stays when the row reads on
    at: _Row  # without tokens behind its base


@dataclass(slots=True)
class States:
    """Those of all rows of one cache. A row that is not there has no positions."""

    shape: StateShape
    device: torch.device
    _rows: dict[int, _Row] = field(default_factory=dict)
    _snapshots: list[_Snapshot] = field(default_factory=list)

    def clear(self, row: int) -> None:
        """``row`` has no positions, and there is nothing to go back to."""
        self._rows.pop(row, None)
        self._snapshots = [each for each in self._snapshots if each.row != row]

    def length(self, row: int) -> int:
        at = self._rows.get(row)
        return 0 if at is None else at.base + self._count(at)

    def reachable(self, row: int, n: int) -> int:
        """The longest beginning of at most ``n`` positions, no more than ``row`` has, that it can be cut to."""
        at = self._rows.get(row)
        if at is None or n >= at.base:
            return n if at is not None else 0
        return max([0, *(each.at.base for each in self._of(row) if each.at.base <= n)])

    def truncate(self, row: int, n: int) -> None:
        """To ``n`` positions, which are reachable."""
        if n == 0:
            self.clear(row)
            return
        self._rows[row] = self._cut(row, n)
        self._snapshots = [each for each in self._snapshots if each.row != row or each.at.base <= n]

    def compact(self, row: int, start: int, keep: I32) -> None:
        """Keep tokens ``start + keep[i]``, from a reachable ``start`` on."""
        if start + len(keep) == 0:
            self.clear(row)
            return
        at = self._rows[row]
        before = start - at.base + self.shape.taps - 1
        if not np.array_equal(keep, np.arange(len(keep))):
            (index,) = uploaded(self.device, np.concatenate([np.arange(before), before + keep]))
            self._rows[row] = replace(at, records=at.records.index_select(1, index))
        else:
            self._rows[row] = replace(at, records=at.records[:, : before + len(keep)])

    def fork(self, src: int, dst: int, n: int) -> None:
        """``dst`` begins with ``n`` positions of ``src``, which are reachable."""
        self.clear(dst)
        if n:
            self._rows[dst] = self._cut(src, n)
            self._snap(dst, True)  # who begins like it may, too

    def keep(self, row: int) -> None:
        """What a prompt that has been read so far leaves stays when it is read on."""
        base = self._rows[row].base if row in self._rows else -1
        self._snapshots = [
            replace(each, kept=each.kept or (each.row == row and each.at.base == base)) for each in self._snapshots
        ]

    # Memory. Snapshots make way for rows, and do not count.

    def growth(self, row: int, n: int) -> int:
        if n <= 0:
            return 0
        at = self._rows.get(row)
        own = at is not None and at.state is not None and self._sharers()[id(at.state)] == 1
        return (0 if own else self.shape.bytes) + self.shape.records_bytes(n)  # beside the records that it has

    def bytes_for(self, positions: int) -> int:
        return self.shape.bytes + 2 * self.shape.records_bytes(1) if positions > 0 else 0

    def fork_bytes(self, src: int, n: int) -> int:
        return self.shape.records_bytes(max(0, n - self._rows[src].base)) if n else 0

    def exclusive(self, rows: Iterable[int]) -> int:
        there = [self._rows[row] for row in set(rows) if row in self._rows]
        ours, all_of_them = Counter(id(at.state) for at in there if at.state is not None), self._sharers()
        alone = sum(all_of_them[state] == n for state, n in ours.items())
        return alone * self.shape.bytes + sum(map(self._records_bytes, there))

    @property
    def bytes(self) -> int:
        return len(self._sharers()) * self.shape.bytes + sum(map(self._records_bytes, self._rows.values()))

    def make_way(self, room: int) -> None:
        """Drop the oldest snapshots until what they alone keep fits into ``room`` bytes."""
        while self._snapshots and self._alone() * self.shape.bytes > room:
            del self._snapshots[0]

    def check(self, row: int, positions: int) -> None:
        """Assert that ``row``'s states are over its ``positions``."""
        assert self.length(row) == positions, "a row's recurrent state is not where its keys and values end"
        at = self._rows.get(row)
        assert at is None or (at.base > 0) == (at.state is not None), "a row has lost its recurrent state"

    def close(self) -> None:
        self._rows.clear()
        self._snapshots.clear()

    # Steps

    def at(self, row: int) -> _Row:
        """Where a step begins."""
        shape = self.shape
        none = torch.zeros((shape.layers, shape.taps - 1, sum(shape.record)), device=self.device)
        return self._rows.get(row) or _Row(0, None, none)

    def taken_up(self, row: int, new: _Row) -> None:
        """What a step over ``row``'s tokens has come to."""
        went_on = self.at(row).reads
        self._rows[row] = new
        if not new.reads:
            return
        # What a prompt's next part makes out of date: unless it is far from the one before.
        before = sorted((each for each in self._of(row) if each.at.base < new.base), key=lambda each: each.at.base)
        if went_on and before and not before[-1].kept:
            start = before[-2].at.base if len(before) > 1 else 0
            if before[-1].at.base - start < EVERY:
                self._snapshots.remove(before[-1])
        self._snap(row)

    def _snap(self, row: int, kept: bool = False) -> None:
        at = self._rows[row]
        if at.state is None or any(each.at.base == at.base for each in self._of(row)):
            return
        tail = replace(at, records=at.records[:, : self.shape.taps - 1].clone(), reads=False)
        self._snapshots.append(_Snapshot(row, kept, tail))
        while len({id(each.at.state) for each in self._snapshots}) > SNAPSHOTS:
            del self._snapshots[0]

    def _cut(self, row: int, n: int) -> _Row:
        at = self._rows[row]
        if n < at.base:
            return next(each.at for each in self._of(row) if each.at.base == n)
        return replace(at, records=at.records[:, : self.shape.taps - 1 + n - at.base])

    def _of(self, row: int) -> list[_Snapshot]:
        return [each for each in self._snapshots if each.row == row]

    def _count(self, at: _Row) -> int:
        return int(at.records.shape[1]) - self.shape.taps + 1

    def _records_bytes(self, at: _Row) -> int:
        return self.shape.records_bytes(self._count(at))

    def _sharers(self) -> Counter[int]:
        """How many rows have a state, by its id."""
        return Counter(id(at.state) for at in self._rows.values() if at.state is not None)

    def _alone(self) -> int:
        """How many states snapshots alone keep."""
        rows = self._sharers()
        return len({id(each.at.state) for each in self._snapshots} - set(rows))


@dataclass(slots=True)
class Level:
    """Tokens of one depth, of all rows: packed ``tokens`` int64 [n], and ``parents`` int64 [n], places in the level
    before, of the first one among rows; None: all in their order."""

    tokens: Tensor
    parents: Tensor | None


class Step:
    """A forward of ``batch`` over recurrent layers, one after the other: replays what rows keep, goes over tokens that
    are never taken back, and keeps records of the others. ``end`` takes it up; until then nothing has changed.

    A token's operations are the same ones whatever is computed beside it: sums and products of single numbers, in one
    order.
    """

    def __init__(self, states: States, batch: Batch) -> None:
        self._states, self._n = states, len(batch)
        shape, before = states.shape, states.shape.taps - 1
        begins, ends = batch.starts[:-1].tolist(), batch.starts[1:].tolist()
        spans = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
        self._names = [int(batch.row[begin]) for begin, _ in spans]
        self._rows = [states.at(name) for name in self._names]
        self._settled = [settled(batch, begin, end) for begin, end in spans]
        there = [at.records.shape[1] for at in self._rows]
        last = np.cumsum(there, dtype=np.int64) - 1  # of each row's records, one row's behind the other's
        past = int(sum(there))
        # Which token a token follows: packed ones, then those of records.
        follows = np.arange(-1, self._n + past - 1)
        for (begin, end), record in zip(spans, last, strict=True):
            parents = batch.parent[begin:end]
            follows[begin:end] = np.where(parents < 0, self._n + record, begin + parents)
        inputs = np.empty((self._n, shape.taps), np.int64)
        inputs[:, -1] = np.arange(self._n)
        for tap in range(before, 0, -1):
            inputs[:, tap - 1] = follows[inputs[:, tap]]
        kept = [begin + n for (begin, _), n in zip(spans, self._settled, strict=True)]  # the first one of each row
        records = [
            np.append(inputs[first, :before], np.arange(first, end))
            for first, (_, end) in zip(kept, spans, strict=True)
        ]
        self._sizes = [len(each) for each in records]
        place = np.zeros(self._n, np.int64)  # of kept tokens among the new records
        for first, (_, end), at in zip(kept, spans, np.cumsum(self._sizes) - self._sizes, strict=True):
            place[first:end] = at + before + np.arange(end - first)
        levels = _levels(batch, spans, kept)
        flat = np.concatenate([np.zeros(0, np.int64), *(tokens for tokens, _ in levels)])
        counts = [n - before for n in there]
        replayed = _ragged([int(end) + 1 - n for end, n in zip(last, counts, strict=True)], counts, past)
        sure = _ragged([begin for begin, _ in spans], self._settled, self._n)
        sent = uploaded(
            states.device, inputs, np.concatenate([np.zeros(0, np.int64), *records]), place[flat], flat, replayed, sure,
            *(each for level in levels for each in level),
        )  # fmt: skip
        self._inputs, self._records, self._place, self._kept, self._replayed, self._sure = sent[:6]
        straight, wide = [], len(spans)
        for tokens, parents in levels:
            straight.append(len(parents) == wide and bool((parents == np.arange(wide)).all()))
            wide = len(tokens)
        self._levels = [
            Level(tokens, None if one else parents)
            for tokens, parents, one in zip(sent[6::2], sent[7::2], straight, strict=True)
        ]
        width, device = sum(shape.record), states.device
        self._past = torch.cat([at.records for at in self._rows], 1) if len(spans) > 1 else self._rows[0].records
        self._new = torch.zeros((shape.layers, sum(self._sizes), width), device=device)
        goes_on = [n + m > 0 for n, m in zip(counts, self._settled, strict=True)]
        self._to = [torch.empty(shape.state, device=device) if on else None for on in goes_on]

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution [N, channels] of inputs ``x`` [N, channels] by ``weight`` [taps, channels], all float32."""
        channels = x.shape[1]
        source = torch.cat([x, self._past[layer, :, :channels]])
        self._new[layer, :, :channels] = source.index_select(0, self._records)
        inputs = source.index_select(0, self._inputs.view(-1)).view(*self._inputs.shape, channels)
        out = inputs[:, 0] * weight[0]
        for tap in range(1, len(weight)):
            out = out + inputs[:, tap] * weight[tap]
        return out

    def gone_over(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, corrects: bool = True
    ) -> Tensor:
        """What a gated delta net gives [N, value_heads, value_dim], of float32 ``query`` and ``key`` [N, key_heads,
        key_dim], ``value`` as the result, ``beta`` and ``decay`` [N, value_heads]. Or a state space, which does not
        correct what a state has for a key: an update is ``beta`` times the value."""
        shape = self._states.shape
        one = torch.zeros(shape.state[1:], device=key.device)
        state = torch.stack([one if at.state is None else at.state[layer] for at in self._rows])
        # Behind the others one that changes nothing, for rows that have fewer: 1 S + 0 0'.
        nothing = self._past.new_zeros((1, self._past.shape[2]))
        nothing[:, -shape.value_heads :] = 1
        _, keys, updates, decays = torch.cat([self._past[layer], nothing]).split(shape.record, 1)
        for at in self._replayed:
            k = keys.index_select(0, at).view(-1, shape.key_heads, shape.key_dim)
            u = updates.index_select(0, at).view(-1, shape.value_heads, shape.value_dim)
            state = _after(state * decays.index_select(0, at)[..., None, None], self._shared(k), u)
        out = value.new_empty((self._n + 1, *value.shape[1:]))
        if len(self._sure):
            padded = [_ended(query, 0), _ended(key, 0), _ended(value, 0), _ended(beta, 0), _ended(decay, 1)]
            for at in self._sure:
                state, _, found = self._token(corrects, state, *(each.index_select(0, at) for each in padded))
                out.index_copy_(0, at, found)
        for b, to in enumerate(self._to):
            if to is not None:
                to[layer] = state[b]
        changes = []
        for level in self._levels:
            if level.parents is not None:
                state = state.index_select(0, level.parents)
            token = (each.index_select(0, level.tokens) for each in (query, key, value, beta, decay))
            state, update, found = self._token(corrects, state, *token)
            out.index_copy_(0, level.tokens, found)
            changes.append(update)
        kept = (key.index_select(0, self._kept), torch.cat(changes), decay.index_select(0, self._kept))
        self._new[layer, :, shape.channels :].index_copy_(0, self._place, torch.cat([x.flatten(1) for x in kept], 1))
        return out[:-1]

    def end(self) -> None:
        parts = self._new.split(self._sizes, 1)
        alone = len(parts) == 1
        new = [
            _Row(
                self._states.length(name) + n,
                at.state if to is None else to,
                part if alone else part.clone(),  # others' records would live as long
                n > 0,
            )
            for name, at, to, part, n in zip(self._names, self._rows, self._to, parts, self._settled, strict=True)
        ]
        for name, row in zip(self._names, new, strict=True):
            self._states.taken_up(name, row)

    def _token(
        self, corrects: bool, state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token of each row: the state after it, the update, and what it gives."""
        key, state = self._shared(key), state * decay[..., None, None]
        update = (value - _summed(state * key[..., None]) if corrects else value) * beta[..., None]
        state = _after(state, key, update)
        return state, update, _summed(state * self._shared(query)[..., None])

    def _shared(self, x: Tensor) -> Tensor:
        """[n, key_heads, key_dim] for each value head: neighbours share one."""
        shape = self._states.shape
        return (
            x if shape.key_heads == shape.value_heads else x.repeat_interleave(shape.value_heads // shape.key_heads, 1)
        )


def _after(state: Tensor, key: Tensor, update: Tensor) -> Tensor:
    return state + key[..., None] * update[..., None, :]


def _ended(x: Tensor, fill: float) -> Tensor:
    """``x`` [n, ...] and one more of ``fill``."""
    return torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])


def _summed(x: Tensor) -> Tensor:
    """Sums over ``x``'s last dimension but one, by halves: a library's order may depend on what else there is."""
    while (n := x.shape[-2]) > 1:
        half = n // 2
        left, right = x[..., :half, :] + x[..., half : 2 * half, :], x[..., 2 * half :, :]
        x = torch.cat([left, right], -2) if n % 2 else left
    return x[..., 0, :]


def settled(batch: Batch, begin: int, end: int) -> int:
    """How many of a row's new tokens, packed from ``begin`` to ``end``, settle as they are read: of a chain of which
    only the last one's output is wanted, or one too long to be kept, all but that one. Those are never taken back.
    Raises ValueError for a tree that is too large."""
    n = end - begin
    chain = bool((batch.parent[begin:end] == np.arange(-1, n - 1)).all())
    first = int(np.searchsorted(batch.wanted, begin))
    reads = first == len(batch.wanted) or int(batch.wanted[first]) >= end - 1
    if chain and (reads or n > KEPT):
        return n - 1
    if n > KEPT:
        raise ValueError(
            f"malformed batch: a tree of {n} tokens is more than the {KEPT} that recurrent layers can take back"
        )
    return 0


def records(batch: Batch) -> dict[int, int]:
    """Of how many new tokens each row keeps records."""
    spans = zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True)
    return {int(batch.row[begin]): end - begin - settled(batch, begin, end) for begin, end in spans if begin < end}


def _levels(batch: Batch, spans: Sequence[tuple[int, int]], kept: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of ``kept`` tokens, from one of each row on to its end: packed tokens of each depth, and their parents' places in
    the depth before, those of the first one their rows'."""
    levels: list[tuple[list[int], list[int]]] = []
    where = np.full(len(batch), -1)  # a token's place in its level
    depth = np.zeros(len(batch), np.int64)
    for b, ((begin, end), first) in enumerate(zip(spans, kept, strict=True)):
        for t in range(first, end):
            parent = begin + int(batch.parent[t])
            inside = batch.parent[t] >= 0 and parent >= first
            at = depth[t] = depth[parent] + 1 if inside else 0
            if at == len(levels):
                levels.append(([], []))
            tokens, parents = levels[at]
            where[t] = len(tokens)
            tokens.append(t)
            parents.append(int(where[parent]) if inside else b)
    return [(np.array(tokens, np.int64), np.array(parents, np.int64)) for tokens, parents in levels]


def _ragged(firsts: Sequence[int], counts: Sequence[int], fill: int) -> np.ndarray:
    """[most of ``counts``, rows]: ``firsts[b]``, the next one ..., and ``fill`` where a row has no more."""
    steps = np.arange(max(counts, default=0))[:, None]
    return np.where(steps < np.array(counts), np.array(firsts) + steps, fill)
