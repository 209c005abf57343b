"""Keys and values of rows as torch tensors: one block of memory a row, addressed by slot, rolled back by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outpace.arrays import I32
from outpace.errors import MemoryLimitError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's cache: key and value heads, and the widths of a key and of a value."""

    heads: int
    key: int
    value: int

    @property
    def width(self) -> int:
        return self.heads * (self.key + self.value)


class _Row:
    """``keys[i]`` and ``values[i]`` [heads, capacity, width] are views into ``blocks`` [..., capacity, width]."""

    __slots__ = ("blocks", "capacity", "keys", "length", "values")

    def __init__(self, shapes: Sequence[LayerShape], capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.length = 0
        first = shapes[0]
        self.keys: list[torch.Tensor]
        self.values: list[torch.Tensor]
        if first.key == first.value and all(shape == first for shape in shapes):
            block = torch.empty((len(shapes), 2, first.heads, capacity, first.key), dtype=dtype, device=device)
            self.blocks = [block]
            self.keys, self.values = [layer[0] for layer in block], [layer[1] for layer in block]
        else:
            self.keys = [torch.empty((s.heads, capacity, s.key), dtype=dtype, device=device) for s in shapes]
            self.values = [torch.empty((s.heads, capacity, s.value), dtype=dtype, device=device) for s in shapes]
            self.blocks = [*self.keys, *self.values]


class TorchKV:
    """The row cache of the Transformers backend; see ``KVCache`` for the contract.

    A row's memory is taken whole at ``alloc`` and is never cleared: only slots below the row's length are read.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
    ) -> None:
        self._shapes = tuple(shapes)
        self.dtype = dtype
        self._device = device
        self._limit = limit
        self._rows: dict[int, _Row] = {}
        self._bytes = 0
        self._position_bytes: int = sum(s.width for s in self._shapes) * dtype.itemsize

    def alloc(self, capacity: int) -> int:
        if capacity < 1:
            raise ValueError(f"a row of {capacity} positions cannot be made: capacity must be at least 1")
        needed = self.bytes_for(capacity)
        if self._limit is not None and self._bytes + needed > self._limit:
            raise MemoryLimitError(
                f"a row of {capacity} positions needs {needed} bytes of KV memory, and {self._limit - self._bytes} of "
                f"{self._limit} are free: wait, shorten the request, or raise the KV memory"
            )
        row = 0
        while row in self._rows:
            row += 1
        try:
            self._rows[row] = _Row(self._shapes, capacity, self.dtype, self._device)
        except (MemoryError, RuntimeError) as error:
            raise MemoryLimitError(
                f"a row of {capacity} positions needs {needed} bytes, which the {self._device.type} does not have: "
                f"shorten the request, or bound the KV memory so that requests wait"
            ) from error
        self._bytes += needed
        return row

    def free(self, row: int) -> None:
        self._bytes -= self.bytes_for(self._rows.pop(row).capacity)

    def length(self, row: int) -> int:
        return self._rows[row].length

    def capacity(self, row: int) -> int:
        return self._rows[row].capacity

    def truncate(self, row: int, n: int) -> None:
        held = self._rows[row]
        if not 0 <= n <= held.length:
            raise ValueError(f"row {row} holds {held.length} positions and cannot be cut to {n}")
        held.length = n

    def compact(self, row: int, start: int, keep: I32) -> None:
        held = self._rows[row]
        n = len(keep)
        if n and (start < 0 or keep[0] < 0 or start + int(keep[-1]) >= held.length or (np.diff(keep) < 1).any()):
            raise ValueError(f"row {row} of length {held.length} cannot keep {keep.tolist()} after {start}: ascending?")
        moved = int((keep != np.arange(n)).argmax()) if n and int(keep[-1]) != n - 1 else n  # before it, all in place
        if moved < n:
            source = torch.from_numpy((keep[moved:] + start).astype(np.int64)).to(self._device)
            for block in held.blocks:
                block[..., start + moved : start + n, :] = block.index_select(-2, source)
        held.length = start + n

    def fork(self, src: int, dst: int, n: int) -> None:
        source, target = self._rows[src], self._rows[dst]
        if not 0 <= n <= source.length or n > target.capacity:
            raise ValueError(
                f"row {dst} (capacity {target.capacity}) cannot take {n} positions of row {src} "
                f"(length {source.length})"
            )
        if src != dst:
            for old, new in zip(source.blocks, target.blocks, strict=True):
                new[..., :n, :] = old[..., :n, :]
        target.length = n

    def bytes_for(self, capacity: int) -> int:
        return self._position_bytes * capacity

    @property
    def bytes(self) -> int:
        return self._bytes

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
        assert self._bytes == sum(self.bytes_for(row.capacity) for row in self._rows.values()), "KV bytes are off"
        assert self._limit is None or self._bytes <= self._limit, "KV memory is over its limit"
        for index, row in self._rows.items():
            assert 0 <= row.length <= row.capacity, f"row {index}: {row.length} of {row.capacity} positions"

    # What a forward does: write behind the row's end, read up to there, lengthen when all went well.

    def tensors(self, row: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values [heads, capacity, width] of every layer; slots beyond the row's length are undefined."""
        held = self._rows[row]
        return held.keys, held.values

    def room(self, row: int, n: int) -> int:
        """The row's length, once it is sure that n more positions fit. Raises ValueError otherwise."""
        held = self._rows.get(row)
        if held is None:
            raise ValueError(f"row {row} is not allocated")
        if held.length + n > held.capacity:
            raise ValueError(f"row {row} holds {held.length} of {held.capacity} positions: {n} more do not fit")
        return held.length

    def lengthen(self, row: int, n: int) -> None:
        self._rows[row].length += n
