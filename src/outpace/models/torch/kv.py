"""Keys and values of rows as torch tensors: one pool of blocks a layer, shared by reference, copied on write.

Row r's slot s lies at position ``blocks[s // size] * size + s % size`` of the pool: everything is read and written by
such positions, wherever a row's blocks are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from outpace.common.arrays import I32
from outpace.errors import MemoryLimitError
from outpace.models.base import KVCache
from outpace.models.torch.recurrent import States, StateShape, Step

BLOCK = 64  # positions; a row wastes half a block, a fork copies at most one
FIRST = 64  # blocks of the pool at first; it doubles
NEVER = -1e30  # the score of what is hidden: finite, so that a token that sees nothing gets a number, too
SPLIT = 256  # slots that attention adds up at a time


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's cache: key and value heads, and the widths of a key and of a value."""

    heads: int
    key: int
    value: int

    @property
    def width(self) -> int:
        return self.heads * (self.key + self.value)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one group's tokens see under one window: the pool's positions ``slots`` int64 [B * L], but for some.

    ``hidden``: bool [B, 1, W, slots from ``covered`` on]; None: all see all. ``blocks``: SPLIT slots are added
    up at a time, whatever L and the device; ``covered`` is 0 then. ``bounds`` int64 [B * 2]: before which of a row's
    slots, and from which on, no token sees any; None: they are not known.
    """

    slots: torch.Tensor
    hidden: torch.Tensor | None
    covered: int
    blocks: bool = False
    bounds: torch.Tensor | None = None


@dataclass(slots=True)
class _Row:
    blocks: list[int] = field(default_factory=list)  # as many as its length takes
    length: int = 0


class TorchKV(KVCache):
    """The cache of the Transformers backend; see ``KVCache``. Only slots below a row's length are ever read.

    ``keys[i]`` and ``values[i]`` [heads, positions, width] are layer i's pool. Behind its last block, from ``spare``
    on, it has one that no row takes, for tokens that only fill up a shape. ``states``: those of recurrent layers, over
    which the forward that runs makes the ``step``.
    """

    block: int = BLOCK
    limit: int | None = None
    bytes_per_position: int = 0

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
        block: int = BLOCK,
        recurrent: StateShape | None = None,
    ) -> None:
        self._shapes = tuple(shapes)
        self.dtype = dtype
        self._device = device
        self.limit = limit
        self.block = block
        self.bytes_per_position = sum(s.width for s in self._shapes) * dtype.itemsize
        self._block_bytes = self.bytes_per_position * block
        self._rows: dict[int, _Row] = {}
        self.states = States(recurrent or StateShape(0, 1, 0), device)
        self.step: Step | None = None
        self._empty()

    def _empty(self) -> None:
        def nothing(heads: int, width: int) -> torch.Tensor:
            return torch.zeros((heads, 0, width), dtype=self.dtype, device=self._device)

        self.keys = [nothing(s.heads, s.key) for s in self._shapes]
        self.values = [nothing(s.heads, s.value) for s in self._shapes]
        self._references = np.zeros(0, np.int32)  # how many rows hold a block
        self._free: list[int] = []  # blocks that no row holds

    @property
    def place(self) -> tuple[int, ...]:
        """Where its keys and values lie, and how many positions they have."""
        return self.keys[0].shape[1], *(each.data_ptr() for each in (*self.keys, *self.values))

    def alloc(self) -> int:
        row = next(row for row in count() if row not in self._rows)
        self._rows[row] = _Row()
        return row

    def free(self, row: int) -> None:
        self._cut(self._state(row), 0)
        del self._rows[row]
        self.states.clear(row)

    def length(self, row: int) -> int:
        return self._state(row).length

    @property
    def recurrent(self) -> bool:
        return self.states.shape.layers > 0

    def reachable(self, row: int, n: int) -> int:
        return self.states.reachable(row, min(max(n, 0), self.length(row)))

    def keep(self, row: int) -> None:
        self.states.keep(row)

    def truncate(self, row: int, n: int) -> None:
        state = self._state(row)
        if not 0 <= n <= state.length:
            raise ValueError(f"row {row} holds {state.length} positions and cannot be cut to {n}")
        self._require_reachable(row, n)
        self.states.truncate(row, n)
        self._cut(state, n)

    def compact(self, row: int, start: int, keep: I32) -> None:
        state = self._state(row)
        n = len(keep)
        ascending = 0 <= start <= state.length and bool((np.diff(keep, prepend=-1) > 0).all())
        if not ascending or (n and start + int(keep[-1]) >= state.length):
            raise ValueError(
                f"row {row} of length {state.length} cannot keep {keep.tolist()} after {start}: ascending?"
            )
        self._require_reachable(row, start)
        moved = int((keep != np.arange(n)).argmax()) if n and int(keep[-1]) != n - 1 else n  # before it, all in place
        if moved < n:
            self._own(state, start + moved, start + n)
            places = self.places(row, state.length)
            self._copy(places[start + keep[moved:]], places[start + moved : start + n])
        self.states.compact(row, start, keep)
        self._cut(state, start + n)

    def fork(self, src: int, dst: int, n: int) -> None:
        source, target = self._state(src), self._state(dst)
        if not 0 <= n <= source.length or target.length:
            raise ValueError(
                f"row {dst} (length {target.length}) cannot begin with {n} positions of row {src} "
                f"(length {source.length})"
            )
        self._require_reachable(src, n)
        self._make_way(self.states.fork_bytes(src, n))
        self.states.fork(src, dst, n)
        target.blocks, target.length = source.blocks[: self._count(n)], n
        self._references[target.blocks] += 1

    def growth(self, row: int, n: int, settled: int = 0) -> int:
        state = self._state(row)
        more = self._count(state.length + n) - len(state.blocks)
        if n and state.length % self.block and self._references[state.blocks[-1]] > 1:
            more += 1
        return more * self._block_bytes + self.states.growth(row, n - settled)

    def bytes_for(self, positions: int) -> int:
        return self._count(positions) * self._block_bytes + self.states.bytes_for(positions)

    def exclusive(self, rows: Sequence[int]) -> int:
        counts = Counter(block for row in set(rows) for block in self._state(row).blocks)
        alone = sum(int(self._references[block]) == n for block, n in counts.items())
        return alone * self._block_bytes + self.states.exclusive(rows)

    @property
    def bytes(self) -> int:
        return (len(self._references) - len(self._free)) * self._block_bytes + self.states.bytes

    @property
    def reserved(self) -> int:
        """Bytes of the pool: what the device has given."""
        return len(self._references) * self._block_bytes

    @property
    def spare(self) -> int:
        """Where the block that no row takes begins."""
        return len(self._references) * self.block

    @property
    def rows(self) -> list[int]:
        return sorted(self._rows)

    def check(self) -> None:
        counts = np.zeros_like(self._references)
        for index, row in self._rows.items():
            assert len(row.blocks) == self._count(row.length), f"row {index}: {row.length} in {len(row.blocks)} blocks"
            np.add.at(counts, row.blocks, 1)
            self.states.check(index, row.length)
        assert (counts == self._references).all(), "blocks are held by other rows than they are counted for"
        assert sorted(self._free) == np.flatnonzero(counts == 0).tolist(), "free blocks are miscounted"
        assert self.limit is None or max(self.bytes, self.reserved) <= self.limit, "KV memory is over its limit"

    def close(self) -> None:
        """Free every row, and give the memory back."""
        self._rows.clear()
        self.states.close()
        self._empty()

    # What a forward does: take blocks behind the rows' ends, write, and lengthen when all went well.

    @contextmanager
    def writing(self, more: Mapping[int, int], kept: Mapping[int, int] | None = None) -> Iterator[None]:
        """Room for ``more[row]`` positions behind each row's end; recurrent layers keep records of ``kept[row]``
        (None: of all).

        When the block under ``with`` ends, the rows are longer by them; when it raises, every row is as it was.
        Raises ValueError for a row that is not there, MemoryLimitError where there is no room.
        """
        before = {row: (self._state(row), list(self._state(row).blocks)) for row in more}
        try:
            for row, n in more.items():
                self._grow(row, n)
            self._make_way(sum(self.states.growth(row, n) for row, n in (kept or more).items()))
            yield
            if self.step is not None:
                self.step.end()
        except BaseException:
            for state, blocks in before.values():
                state.blocks = blocks
            self._references[:] = 0
            for state in self._rows.values():
                self._references[state.blocks] += 1
            self._free = np.flatnonzero(self._references == 0)[::-1].tolist()
            raise
        finally:
            self.step = None
        for row, n in more.items():
            self._rows[row].length += n

    def places(self, row: int, n: int) -> npt.NDArray[np.int64]:
        """Where the row's first ``n`` slots lie in the pool."""
        blocks = np.array(self._state(row).blocks[: self._count(n)], np.int64)
        places: npt.NDArray[np.int64] = (blocks[:, None] * self.block + np.arange(self.block)).reshape(-1)[:n]
        return places

    # States of recurrent layers

    def _require_reachable(self, row: int, n: int) -> None:
        if self.reachable(row, n) != n:
            raise ValueError(
                f"{n} of {self.length(row)} positions of row {row}: its recurrent layers have passed there, and no "
                f"state of it was kept (KVCache.reachable)"
            )

    def _make_way(self, more: int) -> None:
        """Room for so many ``more`` bytes of states: snapshots go first. Raises MemoryLimitError."""
        if self.limit is None:
            return
        room = self.limit - self.bytes - more
        if room < 0:
            raise MemoryLimitError(
                f"of the {self.limit} bytes of KV memory {self.bytes} are in use, and recurrent layers' states would "
                f"take {more} more: wait, or raise the KV memory"
            )
        self.states.make_way(room)

    # Blocks

    def _state(self, row: int) -> _Row:
        state = self._rows.get(row)
        if state is None:
            raise ValueError(f"row {row} is not allocated")
        return state

    def _count(self, positions: int) -> int:
        return -(-positions // self.block)

    def _cut(self, state: _Row, n: int) -> None:
        keep = self._count(n)
        for block in state.blocks[keep:]:
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)
        del state.blocks[keep:]
        state.length = n

    def _grow(self, row: int, n: int) -> None:
        """Blocks for ``n`` more positions of the row, and none of those that it will write in shared."""
        state = self._rows[row]
        try:
            self._own(state, state.length, state.length + n)
            missing = self._count(state.length + n) - len(state.blocks)
            state.blocks += [self._take(missing - i) for i in range(missing)]
        except MemoryLimitError as error:
            raise MemoryLimitError(f"{n} more positions of row {row} do not fit: {error}") from error

    def _own(self, state: _Row, start: int, end: int) -> None:
        """Copy those of the row's blocks that it shares and that have slots of ``start .. end - 1``."""
        for i in range(start // self.block, min(self._count(end), len(state.blocks))):
            old = state.blocks[i]
            if self._references[old] > 1:
                state.blocks[i] = self._take(1)
                self._references[old] -= 1
                inside = np.arange(self.block)
                self._copy(old * self.block + inside, state.blocks[i] * self.block + inside)

    def _take(self, missing: int) -> int:
        """A free block; ``missing``: how many will be asked for now."""
        if not self._free:
            self._extend(missing)
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _extend(self, missing: int) -> None:
        """Make the pool larger: twice as large, or what the limit or the device allows. Raises MemoryLimitError.

        On a card with a limit it has its full size from the first: addresses stay, so that graphs may keep them. Not
        beside states, which take of the same memory.
        """
        there = len(self._references)
        most = self.limit // self._block_bytes if self.limit is not None else max(FIRST, 2 * there, there + missing)
        full = self._device.type != "cpu" and not self.recurrent
        wanted = most if full else min(most, max(FIRST, 2 * there, there + missing))
        while wanted > there:
            try:
                for pool in (self.keys, self.values):
                    for i, old in enumerate(pool):
                        if old.shape[1] < (wanted + 1) * self.block:
                            pool[i] = self._larger(old, (wanted + 1) * self.block)
                break
            except (MemoryError, RuntimeError):  # what torch raises where memory is short
                wanted = there + (wanted - there) // 2
        else:
            raise MemoryLimitError(self._full())
        self._free += range(wanted - 1, there - 1, -1)
        self._references = np.append(self._references, np.zeros(wanted - there, np.int32))

    def _larger(self, old: torch.Tensor, positions: int) -> torch.Tensor:
        with torch.inference_mode(False):  # what a forward allocates is written outside of forwards, too
            new = torch.empty((old.shape[0], positions, old.shape[2]), dtype=self.dtype, device=self._device)
            new[:, : old.shape[1]] = old
            new[:, -self.block :] = 0  # masked positions, too, have to be numbers
            return new

    def _full(self) -> str:
        if self.limit is not None and self.limit // self._block_bytes <= len(self._references):
            return (
                f"all of the {self.limit} bytes of KV memory are in use (a block of {self.block} positions takes "
                f"{self._block_bytes}): wait, shorten the request, or raise the KV memory"
            )
        return (
            f"the {self._device.type} has no {self._block_bytes} bytes left for a block of {self.block} positions: "
            f"shorten the request, or bound the KV memory so that requests wait"
        )

    def _copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy positions of every layer's pool."""
        both = torch.from_numpy(np.stack([sources, targets])).to(self._device, non_blocking=True)
        for tensor in (*self.keys, *self.values):
            tensor[:, both[1]] = tensor[:, both[0]]
