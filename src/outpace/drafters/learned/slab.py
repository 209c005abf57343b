"""Keys and values of rows in one pair of tensors, a slot each, for small networks in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.errors import MemoryLimitError

BLOCK = 64  # positions that memory is counted in


class Slab:
    """Rows of keys and values [n, heads, head_dim], made when they are first lengthened. ``limit``: bound in bytes."""

    def __init__(
        self, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, limit: int | None = None
    ) -> None:
        self._shape, self._device, self._dtype, self._limit = (heads, head_dim), device, dtype, limit
        self._k = self._v = torch.empty(0, 0, heads, head_dim, device=device, dtype=dtype)
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._block: int = 2 * BLOCK * heads * head_dim * dtype.itemsize  # bytes

    @property
    def rows(self) -> list[int]:
        return list(self._lengths)

    def length(self, row: int) -> int:
        return self._lengths.get(row, 0)

    def lengthen(self, rows: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Room for ``counts[b]`` more positions of each row; where they begin. Raises MemoryLimitError; then nothing
        has changed."""
        starts = [self.length(row) for row in rows]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        need = self.bytes + sum(self.growth(row, end) for row, end in zip(rows, ends, strict=True))
        if self._limit is not None and need > self._limit:
            raise MemoryLimitError(f"the drafter's rows need {need:,} bytes of KV, and have {self._limit:,}")
        self._hold(len(set(self._slots) | set(rows)), max(ends, default=0))
        for row, end in zip(rows, ends, strict=True):
            if row not in self._slots:
                used = set(self._slots.values())
                self._slots[row] = next(slot for slot in range(len(self._k)) if slot not in used)
            self._lengths[row] = end
        return starts

    def _hold(self, slots: int, positions: int) -> None:
        """Tensors for so many rows of so many positions."""
        have, longest = self._k.shape[:2]
        if slots <= have and positions <= longest:
            return
        size = (max(slots, have if slots <= have else 2 * have), -(-max(positions, longest) // (4 * BLOCK)) * 4 * BLOCK)
        if positions > longest:
            size = (size[0], max(size[1], 2 * longest))
        for name in ("_k", "_v"):
            new = torch.zeros(*size, *self._shape, device=self._device, dtype=self._dtype)
            new[:have, :longest] = getattr(self, name)
            setattr(self, name, new)

    def write(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], k: Tensor, v: Tensor) -> None:
        """``k`` and ``v`` [N, heads, head_dim], packed, at ``starts[b]`` of each row."""
        slot = np.repeat([self._slots[row] for row in rows], counts)
        at = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        where = torch.from_numpy(slot).to(self._device), torch.from_numpy(at).to(self._device)
        self._k[where], self._v[where] = k, v

    def read(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, s, heads, head_dim] up to the longest row, and bool [B, s]: what each row has."""
        lengths = torch.tensor([self.length(row) for row in rows], device=self._device)
        slots = torch.tensor([self._slots[row] for row in rows], device=self._device)
        longest = max(self.length(row) for row in rows)
        there = torch.arange(longest, device=self._device)[None] < lengths[:, None]
        return self._k[slots, :longest], self._v[slots, :longest], there

    def truncate(self, row: int, n: int) -> None:
        """Keep the first n positions; a row without any is gone."""
        if n == 0:
            self.release(row)
        else:
            assert n <= self._lengths[row], f"{n} positions of a row that has {self._lengths[row]}"
            self._lengths[row] = n

    def fork(self, src: int, dst: int, n: int) -> None:
        """``dst``, which is not there, begins with the first n positions of ``src``. Raises MemoryLimitError."""
        assert dst not in self._slots, f"row {dst} is there already"
        assert n <= self.length(src), f"{n} positions of a row that has {self.length(src)}"
        if n:
            self.lengthen([dst], [n])
            a, b = self._slots[src], self._slots[dst]
            self._k[b, :n], self._v[b, :n] = self._k[a, :n], self._v[a, :n]

    def release(self, row: int) -> None:
        self._slots.pop(row, None)
        self._lengths.pop(row, None)

    def growth(self, row: int, positions: int) -> int:
        held = -(-self.length(row) // BLOCK)
        return max(-(-positions // BLOCK) - held, 0) * self._block

    @property
    def bytes(self) -> int:
        return sum(-(-n // BLOCK) for n in self._lengths.values()) * self._block

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._slots) == set(self._lengths)
        assert set(self._slots) <= set(rows), f"rows {set(self._slots) - set(rows)} were never released"
        assert len(set(self._slots.values())) == len(self._slots), "two rows share a slot"
        assert self._limit is None or self.bytes <= self._limit

    def close(self) -> None:
        self._slots.clear()
        self._lengths.clear()
        self._k = self._v = torch.empty(0, 0, *self._shape, device=self._device, dtype=self._dtype)
