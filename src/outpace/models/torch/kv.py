"""Keys and values of rows as torch tensors: blocks of a pool, taken as rows grow, shared by reference, copied on write.

Memory comes in slabs of many blocks. A row takes the block behind its last one where it can, so that its keys are
mostly one view of one slab; a row in several runs is read run by run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from outpace.common.arrays import I32
from outpace.errors import MemoryLimitError
from outpace.models.torch.slabs import LayerShape, Run, Slab, run_of

BLOCK = 64  # positions; a row wastes half a block, a fork copies at most one
SLAB = 64  # blocks of the first slab; a later one doubles the pool
LARGEST = 1 << 30  # bytes of a slab, unless one row needs more at once
ROOM = 8  # blocks that a row's new run should be able to grow by before a slab is added


@dataclass(slots=True)
class _Row:
    blocks: list[int] = field(default_factory=list)  # as many as its length takes
    length: int = 0
    runs: list[Run] | None = None  # of ``blocks``; None: not known


class TorchKV:
    """The cache of the Transformers backend; see ``KVCache``. Only slots below a row's length are ever read."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
        block: int = BLOCK,
    ) -> None:
        self._shapes = tuple(shapes)
        self.dtype = dtype
        self._device = device
        self._limit = limit
        self._size = block
        self._position_bytes: int = sum(s.width for s in self._shapes) * dtype.itemsize
        self._block_bytes: int = self._position_bytes * block
        self._rows: dict[int, _Row] = {}
        self._slabs: list[Slab] = []
        self._references = np.zeros(0, np.int32)  # how many rows hold a block
        self._slab_of = np.zeros(0, np.int32)
        self._used = 0  # blocks that some row holds

    @property
    def block(self) -> int:
        return self._size

    def alloc(self) -> int:
        row = 0
        while row in self._rows:
            row += 1
        self._rows[row] = _Row()
        return row

    def free(self, row: int) -> None:
        self._cut(self._state(row), 0)
        del self._rows[row]

    def length(self, row: int) -> int:
        return self._state(row).length

    def truncate(self, row: int, n: int) -> None:
        state = self._state(row)
        if not 0 <= n <= state.length:
            raise ValueError(f"row {row} holds {state.length} positions and cannot be cut to {n}")
        self._cut(state, n)

    def compact(self, row: int, start: int, keep: I32) -> None:
        state = self._state(row)
        n = len(keep)
        if (
            start < 0
            or start > state.length
            or (n and (keep[0] < 0 or start + int(keep[-1]) >= state.length or (np.diff(keep) < 1).any()))
        ):
            raise ValueError(
                f"row {row} of length {state.length} cannot keep {keep.tolist()} after {start}: ascending?"
            )
        moved = int((keep != np.arange(n)).argmax()) if n and int(keep[-1]) != n - 1 else n  # before it, all in place
        if moved < n:
            self._own(state, start + moved, start + n)
            self._move(state, (keep[moved:] + start).tolist(), start + moved)
        self._cut(state, start + n)

    def fork(self, src: int, dst: int, n: int) -> None:
        source, target = self._state(src), self._state(dst)
        if not 0 <= n <= source.length or target.length:
            raise ValueError(
                f"row {dst} (length {target.length}) cannot begin with {n} positions of row {src} "
                f"(length {source.length})"
            )
        shared = source.blocks[: self._count(n)]
        self._references[shared] += 1
        target.blocks, target.length, target.runs = shared, n, None

    def growth(self, row: int, n: int) -> int:
        state = self._state(row)
        more = self._count(state.length + n) - len(state.blocks)
        if n and state.length % self._size and self._references[state.blocks[-1]] > 1:
            more += 1
        return more * self._block_bytes

    def bytes_for(self, positions: int) -> int:
        return self._count(positions) * self._block_bytes

    def exclusive(self, rows: Sequence[int]) -> int:
        counts = Counter(block for row in set(rows) for block in self._state(row).blocks)
        return sum(int(self._references[block]) == n for block, n in counts.items()) * self._block_bytes

    @property
    def bytes(self) -> int:
        return self._used * self._block_bytes

    @property
    def reserved(self) -> int:
        """Bytes of the slabs: what the device has given."""
        return len(self._references) * self._block_bytes

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def rows(self) -> list[int]:
        return sorted(self._rows)

    @property
    def bytes_per_position(self) -> int:
        return self._position_bytes

    def check(self) -> None:
        counts = np.zeros_like(self._references)
        for index, row in self._rows.items():
            assert len(row.blocks) == self._count(row.length), f"row {index}: {row.length} in {len(row.blocks)} blocks"
            np.add.at(counts, row.blocks, 1)
            assert row.runs is None or row.runs == self._runs_of(row.blocks), (
                f"row {index}: its runs are not its blocks"
            )
        assert (counts == self._references).all(), "blocks are held by other rows than they are counted for"
        assert self._used == np.count_nonzero(counts), "blocks in use are miscounted"
        assert self._limit is None or self.bytes <= self.reserved <= self._limit, "KV memory is over its limit"

    def close(self) -> None:
        """Free every row, and give the memory back."""
        self._rows.clear()
        self._slabs.clear()
        self._references = self._slab_of = np.zeros(0, np.int32)
        self._used = 0

    # What a forward does: take blocks behind the rows' ends, write, and lengthen when all went well.

    @contextmanager
    def writing(self, more: Mapping[int, int]) -> Iterator[dict[int, list[Run]]]:
        """Room for ``more[row]`` positions behind each row's end: where all of its slots lie, those too.

        When the block under ``with`` ends, the rows are longer by them; when it raises, every row is as it was.
        Raises ValueError for a row that is not there, MemoryLimitError where there is no room.
        """
        for row in more:
            self._state(row)
        before = {row: list(state.blocks) for row, state in self._rows.items()}
        try:
            for row, n in more.items():
                self._grow(row, n)
            yield {row: self._runs(self._rows[row]) for row in more}
        except BaseException:
            for row, blocks in before.items():
                state = self._rows[row]
                if state.blocks != blocks:
                    state.blocks, state.runs = blocks, None
            self._references[:] = 0
            for state in self._rows.values():
                self._references[state.blocks] += 1
            self._used = int(np.count_nonzero(self._references))
            raise
        for row, n in more.items():
            self._rows[row].length += n

    def runs(self, row: int) -> list[Run]:
        """Where the row's slots lie, in order; the last run may go on beyond the row's end."""
        return self._runs(self._state(row))

    # Blocks

    def _state(self, row: int) -> _Row:
        state = self._rows.get(row)
        if state is None:
            raise ValueError(f"row {row} is not allocated")
        return state

    def _count(self, positions: int) -> int:
        return -(-positions // self._size)

    def _cut(self, state: _Row, n: int) -> None:
        keep = self._count(n)
        if keep < len(state.blocks):
            gone = state.blocks[keep:]
            del state.blocks[keep:]
            state.runs = None
            self._references[gone] -= 1
            self._used -= int((self._references[gone] == 0).sum())
        state.length = n

    def _grow(self, row: int, n: int) -> None:
        """Blocks for ``n`` more positions of the row, and none of those that it will write in shared."""
        state = self._rows[row]
        try:
            self._own(state, state.length, state.length + n)
            missing = self._count(state.length + n) - len(state.blocks)
            while missing > 0:
                state.blocks.append(self._take(state.blocks[-1] if state.blocks else -1, missing))
                state.runs = None
                missing -= 1
        except MemoryLimitError as error:
            raise MemoryLimitError(f"{n} more positions of row {row} do not fit: {error}") from error

    def _own(self, state: _Row, start: int, end: int) -> None:
        """Copy those of the row's blocks that it shares and that have slots of ``start .. end - 1``."""
        for i in range(start // self._size, min(self._count(end), len(state.blocks))):
            old = state.blocks[i]
            if self._references[old] > 1:
                stays = self._follows(old) and i + 1 == len(state.blocks)
                new = self._take(-1 if stays or not i else state.blocks[i - 1], len(state.blocks) - i)
                source, target = self._slabs[self._slab_of[old]], self._slabs[self._slab_of[new]]
                a, b = (old - source.first) * self._size, (new - target.first) * self._size
                for shared, own in zip(source.tensors, target.tensors, strict=True):
                    own[..., b : b + self._size, :] = shared[..., a : a + self._size, :]
                # The row that goes on keeps the place with room behind it; it moves where another goes on there.
                movers = [row for row in self._rows.values() if row is not state and old in row.blocks]
                for row in movers if stays else [state]:
                    row.blocks[row.blocks.index(old)], row.runs = new, None
                    self._references[old] -= 1
                    self._references[new] += 1
                self._references[new] -= 1  # what taking it counted

    def _follows(self, block: int) -> bool:
        """Whether the block behind this one is free."""
        after = block + 1
        return (
            after < len(self._references)
            and self._slab_of[after] == self._slab_of[block]
            and not self._references[after]
        )

    def _take(self, last: int, missing: int) -> int:
        """A free block, the one behind ``last`` if it can be; ``missing``: how many the row will ask for now."""
        found = last + 1
        if last < 0 or not self._follows(last):
            found, room = self._place()
            if room < max(missing, ROOM) and self._extend(missing):
                found, _ = self._place()
            elif found < 0:
                raise MemoryLimitError(self._full())
        self._references[found] = 1
        self._used += 1
        return found

    def _place(self) -> tuple[int, int]:
        """Where a new run begins, and how many blocks it can have there; (-1, 0) when none is free.

        Behind a block in use a run begins half-way through the free ones: the row before it may grow, too.
        """
        free = self._references == 0
        edge = np.ones(len(free) + 1, bool)
        edge[1:-1] = (free[1:] != free[:-1]) | (self._slab_of[1:] != self._slab_of[:-1])
        edges = np.flatnonzero(edge)
        best = (-1, 0)
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if free[begin]:
                taken = begin > 0 and self._slab_of[begin - 1] == self._slab_of[begin]
                start = begin + (end - begin) // 2 if taken else begin
                if end - start > best[1]:
                    best = (start, end - start)
        return best

    def _extend(self, missing: int) -> bool:
        """Add a slab; whether that was possible. One of fewer blocks where the limit or the device demands it."""
        there = len(self._references)
        blocks = max(missing, min(max(SLAB, there), LARGEST // self._block_bytes))
        if self._limit is not None:
            blocks = min(blocks, self._limit // self._block_bytes - there)
        while blocks > 0:
            try:
                with torch.inference_mode(False):  # what a forward allocates is written outside of forwards, too
                    slab = Slab(self._shapes, there, blocks, self._size, self.dtype, self._device)
                break
            except (MemoryError, RuntimeError):  # what torch raises where memory is short
                blocks //= 2
        else:
            return False
        self._slab_of = np.append(self._slab_of, np.full(blocks, len(self._slabs), np.int32))
        self._references = np.append(self._references, np.zeros(blocks, np.int32))
        self._slabs.append(slab)
        return True

    def _full(self) -> str:
        if self._limit is not None and self._limit // self._block_bytes <= len(self._references):
            return (
                f"all of the {self._limit} bytes of KV memory are in use (a block of {self._size} positions takes "
                f"{self._block_bytes}): wait, shorten the request, or raise the KV memory"
            )
        return (
            f"the {self._device.type} has no {self._block_bytes} bytes left for a block of {self._size} positions: "
            f"shorten the request, or bound the KV memory so that requests wait"
        )

    def _runs(self, state: _Row) -> list[Run]:
        if state.runs is None:
            state.runs = self._runs_of(state.blocks)
        return state.runs

    def _runs_of(self, blocks: list[int]) -> list[Run]:
        runs: list[Run] = []
        begin = 0
        for i in range(1, len(blocks) + 1):
            ends = i == len(blocks) or blocks[i] != blocks[i - 1] + 1
            if ends or self._slab_of[blocks[i]] != self._slab_of[blocks[i - 1]]:
                slab = self._slabs[self._slab_of[blocks[begin]]]
                at = (blocks[begin] - slab.first) * self._size
                runs.append(Run(slab, begin * self._size, at, (i - begin) * self._size))
                begin = i
        return runs

    def _move(self, state: _Row, sources: list[int], start: int) -> None:
        """Copy slots ``sources`` (ascending, none below where it goes) to ``start`` and on."""
        runs = self._runs(state)
        only = next((run for run in runs if run.slot <= start and sources[-1] < run.slot + run.count), None)
        if only is not None:
            shift = only.at - only.slot
            index = torch.tensor(sources, dtype=torch.int64, device=self._device) + shift
            for tensor in only.slab.tensors:
                tensor[..., start + shift : start + shift + len(sources), :] = tensor.index_select(-2, index)
            return
        for target, source in enumerate(sources, start):
            a, b = run_of(runs, source), run_of(runs, target)
            for old, own in zip(a.slab.tensors, b.slab.tensors, strict=True):
                own[..., b.at, :] = old[..., a.at, :]
