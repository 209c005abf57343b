"""Recurrent states of rows as torch tensors, which can be cut back to any of the last few tokens without a copy.

The rules are the native runtime's (``docs/recurrent.md``): a row keeps its states at a base, and of the tokens behind
it records of what brings a state over them, which the next forward replays. Tensors are not written any more once a row
has them, so that rows and snapshots share them by reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    """Those of all rows of one cache. A row that is not there has no positions. Without layers nothing is kept, and
    rows can be cut anywhere."""

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
        if not self.shape.layers or (at is not None and n >= at.base):
            return n
        return max([0, *(each.at.base for each in self._of(row) if each.at.base <= n)])

    def truncate(self, row: int, n: int) -> None:
        """To ``n`` positions, which are reachable."""
        if n == 0 or not self.shape.layers:
            self.clear(row)
            return
        self._rows[row] = self._cut(row, n)
        self._snapshots = [each for each in self._snapshots if each.row != row or each.at.base <= n]

    def compact(self, row: int, start: int, keep: I32) -> None:
        """Keep tokens ``start + keep[i]``, from a reachable ``start`` on."""
        if start + len(keep) == 0 or not self.shape.layers:
            self.clear(row)
            return
        at = self._rows[row]
        before = start - at.base + self.shape.taps - 1
        (index,) = uploaded(self.device, np.append(np.arange(before), before + keep))
        self._rows[row] = replace(at, records=at.records.index_select(1, index))

    def fork(self, src: int, dst: int, n: int) -> None:
        """``dst`` begins with ``n`` positions of ``src``, which are reachable."""
        self.clear(dst)
        if n and self.shape.layers:
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
        return self.shape.records_bytes(max(0, n - self.at(src).base)) if n else 0

    def exclusive(self, rows: Iterable[int]) -> int:
        there = [self._rows[row] for row in set(rows) if row in self._rows]
        all_of_them = self._sharers()
        alone = sum(all_of_them[state] == n for state, n in self._sharers(there).items())
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
        at, length = self._rows.get(row), self.length(row) if self.shape.layers else positions
        assert length == positions, "a row's recurrent state is not where its keys and values end"
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
        went_on, before = self.at(row).reads, self._of(row)
        self._rows[row] = new
        if not new.reads:
            return
        # What a prompt's next part makes out of date: unless it is far from the one before.
        bases = [0, 0, *(each.at.base for each in before)]
        if went_on and before and not before[-1].kept and bases[-1] - bases[-2] < EVERY:
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
        """The row's, ascending: it has none beyond its end."""
        return [each for each in self._snapshots if each.row == row]

    def _count(self, at: _Row) -> int:
        return int(at.records.shape[1]) - self.shape.taps + 1

    def _records_bytes(self, at: _Row) -> int:
        return self.shape.records_bytes(self._count(at))

    def _sharers(self, rows: Iterable[_Row] | None = None) -> Counter[int]:
        """How many ``rows`` (None: of all) have a state, by its id."""
        every = self._rows.values() if rows is None else rows
        return Counter(id(at.state) for at in every if at.state is not None)

    def _alone(self) -> int:
        """How many states snapshots alone keep."""
        return len({id(each.at.state) for each in self._snapshots} - set(self._sharers()))


@dataclass(slots=True)
class _Part:
    """One row's part of a step: packed tokens ``begin .. end``, of which the first ``settled`` are never taken back.

    ``parents``: of each token among them; -1: all that the row has. ``inputs`` int64 [tokens, taps] of a token's
    convolution, and ``kept`` [taps - 1 + tokens kept], which stay: among what the row keeps and the tokens behind it.
    ``state``, ``records``: what the row has after the step.
    """

    row: int
    at: _Row
    begin: int
    end: int
    settled: int
    parents: list[int]
    inputs: Tensor
    kept: Tensor
    state: Tensor | None
    records: Tensor


class Step:
    """A forward of ``batch`` over recurrent layers, one after the other: replays what rows keep, goes over tokens that
    are never taken back, and keeps records of the others. ``end`` takes it up; until then nothing has changed.

    A token's operations are the same ones whatever is computed beside it: sums and products of single numbers, in one
    order.
    """

    def __init__(self, states: States, batch: Batch) -> None:
        self._states = states
        bounds = zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True)
        self._parts = [self._part(batch, begin, end) for begin, end in bounds if begin < end]

    def _part(self, batch: Batch, begin: int, end: int) -> _Part:
        states, shape, row = self._states, self._states.shape, int(batch.row[begin])
        at, n, parents = states.at(row), settled(batch, begin, end), batch.parent[begin:end]
        past = at.records.shape[1]
        follows = np.append(np.arange(-1, past - 1), np.where(parents < 0, past - 1, past + parents))
        inputs = [np.arange(past, past + end - begin)]
        while len(inputs) < shape.taps:
            inputs.insert(0, follows[inputs[0]])
        taps = np.stack(inputs, 1)
        where, kept = uploaded(states.device, taps, np.append(taps[n, :-1], taps[n:, -1]))
        state = at.state
        if n or past >= shape.taps:  # it goes on
            state = torch.empty(shape.state, device=states.device)
        records = torch.empty((shape.layers, len(kept), sum(shape.record)), device=states.device)
        return _Part(row, at, begin, end, n, parents.tolist(), where, kept, state, records)

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution [N, channels] of inputs ``x`` [N, channels] by ``weight`` [taps, channels], all float32."""
        out, channels = torch.empty_like(x), x.shape[1]
        for part in self._parts:
            source = torch.cat([part.at.records[layer, :, :channels], x[part.begin : part.end]])
            part.records[layer, :, :channels] = source[part.kept]
            each = source[part.inputs].unbind(1)
            total = each[0] * weight[0]
            for tap in range(1, len(weight)):
                total = total + each[tap] * weight[tap]
            out[part.begin : part.end] = total
        return out

    def gone_over(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, corrects: bool = True
    ) -> Tensor:
        """What a gated delta net gives [N, value_heads, value_dim], of float32 ``query`` and ``key`` [N, key_heads,
        key_dim], ``value`` as the result, ``beta`` and ``decay`` [N, value_heads]. Or a state space, which does not
        correct what a state has for a key: an update is ``beta`` times the value."""
        shape, out = self._states.shape, torch.empty_like(value)
        before, each = shape.taps - 1, shape.value_heads // shape.key_heads
        # Neighbours among the value heads share a key head.
        query, shared = query.repeat_interleave(each, 1)[..., None], key.repeat_interleave(each, 1)[..., None]

        def token(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
            """The state after packed token ``t``, and the update."""
            state, k = state * decay[t][:, None, None], shared[t]
            update = (value[t] - _summed(state * k) if corrects else value[t]) * beta[t][:, None]
            state = state + k * update[:, None]
            out[t] = _summed(state * query[t])
            return state, update

        for part in self._parts:
            state = out.new_zeros(shape.state[1:]) if part.at.state is None else part.at.state[layer]
            _, keys, updates, decays = part.at.records[layer, before:].split(shape.record, 1)
            keys = keys.unflatten(1, (shape.key_heads, -1)).repeat_interleave(each, 1)[..., None]
            updates = updates.unflatten(1, (shape.value_heads, 1, -1))
            for k, u, d in zip(keys, updates, decays, strict=True):
                state = state * d[:, None, None] + k * u
            first = part.begin + part.settled
            for t in range(part.begin, first):
                state, _ = token(state, t)
            if part.state is not None and part.state is not part.at.state:
                part.state[layer] = state
            after, changes = {part.settled - 1: state}, []
            for at, parent in enumerate(part.parents[part.settled :], part.settled):
                before_it = after[parent] if parent in part.parents[at + 1 :] else after.pop(parent)
                after[at], update = token(before_it, part.begin + at)
                changes.append(update.flatten())
            kept = (key[first : part.end].flatten(1), torch.stack(changes), decay[first : part.end])
            part.records[layer, before:, shape.channels :] = torch.cat(kept, 1)
        return out

    def end(self) -> None:
        for part in self._parts:
            base = self._states.length(part.row) + part.settled
            self._states.taken_up(part.row, _Row(base, part.state, part.records, part.settled > 0))


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
