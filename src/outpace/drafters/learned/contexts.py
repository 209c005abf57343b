"""Keys and values of a drafter's rows, each with the positions it has, in numpy or torch arrays; and what makes
``parallel.Blocks`` of a network that knows of no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outpace.arrays import I32
from outpace.drafters.learned.parallel import Picker, Said

BLOCK = 64  # positions that memory is taken in


@dataclass(slots=True)
class _Row:
    positions: I32  # [n] ascending
    values: Any  # [layers, 2, capacity, heads, head_dim], of which n are in use


class Contexts:
    """Rows, made when they are first appended to. ``zeros(shape)`` makes an array; ``itemsize``: bytes of a number."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, zeros: Callable[[tuple[int, ...]], Any], itemsize: int
    ) -> None:
        self._layers, self._heads, self._head_dim, self._zeros = layers, heads, head_dim, zeros
        self._each = layers * 2 * heads * head_dim * itemsize  # bytes of a position
        self._rows: dict[int, _Row] = {}

    def end(self, row: int) -> int:
        """The position after the row's last one; 0 for a row that is not there."""
        its = self._rows.get(row)
        return 0 if its is None or not len(its.positions) else int(its.positions[-1]) + 1

    def append(self, row: int, positions: I32, values: Any) -> None:
        """``values`` [layers, 2, n, heads, head_dim] of ``positions`` int32 [n], ascending and beyond its last one."""
        its = self._rows.get(row)
        if its is None:
            its = self._rows[row] = _Row(np.zeros(0, np.int32), self._made(0))
        n, more = len(its.positions), len(positions)
        assert not more or positions[0] >= self.end(row), f"row {row} has position {positions[0]} already"
        if n + more > its.values.shape[2]:
            wider = self._made(n + more)
            wider[:, :, :n] = its.values[:, :, :n]
            its.values = wider
        its.values[:, :, n : n + more] = values
        its.positions = np.concatenate([its.positions, positions])

    def read(self, row: int) -> Any:
        """What the row has: [layers, 2, n, heads, head_dim], a view."""
        its = self._rows[row]
        return its.values[:, :, : len(its.positions)]

    def fork(self, src: int, dst: int, end: int) -> None:
        """``dst``, which is not there, begins with copies of what ``src`` has of positions below ``end``."""
        assert dst not in self._rows, f"row {dst} is there already"
        its = self._rows.get(src)
        n = 0 if its is None else int(np.searchsorted(its.positions, end))
        if its is not None and n:
            self.append(dst, its.positions[:n], its.values[:, :, :n])

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def growth(self, row: int, positions: int) -> int:
        """Bytes more that the row takes once it has so many positions."""
        its = self._rows.get(row)
        held = 0 if its is None else its.values.shape[2]
        return max(capacity(positions) - held, 0) * self._each

    @property
    def bytes(self) -> int:
        """What all rows take now."""
        return sum(int(its.values.shape[2]) for its in self._rows.values()) * self._each

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        for row, its in self._rows.items():
            assert (np.diff(its.positions) > 0).all(), f"row {row} has a position twice"
            assert len(its.positions) <= its.values.shape[2], f"row {row} is longer than its memory"

    def close(self) -> None:
        self._rows.clear()

    def _made(self, n: int) -> Any:
        return self._zeros((self._layers, 2, capacity(n), self._heads, self._head_dim))


def capacity(n: int) -> int:
    """Positions that memory is taken for where ``n`` are needed: whole blocks, an eighth to a quarter ahead at most, so
    that a row which grows is copied rarely."""
    blocks = -(-n // BLOCK)
    step = max(1, 1 << max(blocks.bit_length() - 3, 0))
    return -(-blocks // step) * step * BLOCK


class Network(Protocol):
    """What computes ``parallel.Blocks``, whose words it shares."""

    ids: I32
    slots: int
    max_length: int

    def contexts(self) -> Contexts:
        """Room for rows' keys and values."""

    def context(self, taps: Sequence[Any], positions: Sequence[I32]) -> list[Any]:
        """Keys and values [layers, 2, n, kv_heads, head_dim] of each row's ``taps`` [n, T, H], in the arrays of the
        target's backend, at ``positions`` int32 [n]."""

    def draft(
        self, anchors: I32, positions: I32, contexts: Sequence[Any], pickers: Sequence[Picker | None], most: int
    ) -> Said:
        """The first ``most`` tokens of a block for each row: see ``parallel.Blocks``."""


class ContextBlocks:
    """See ``parallel.Blocks``."""

    def __init__(self, network: Network) -> None:
        self._network, self.contexts = network, network.contexts()
        self.ids, self.slots, self.max_length = network.ids, network.slots, network.max_length

    def end(self, row: int) -> int:
        return self.contexts.end(row)

    def read(self, rows: Sequence[int], taps: Sequence[Any], positions: Sequence[I32]) -> None:
        for row, its, at in zip(rows, self._network.context(taps, positions), positions, strict=True):
            self.contexts.append(row, at, its)

    def draft(
        self, rows: Sequence[int], anchors: I32, positions: I32, pickers: Sequence[Picker | None], counts: I32
    ) -> Said:
        each = [self.contexts.read(row) for row in rows]
        return self._network.draft(anchors, positions, each, pickers, int(counts.max()))

    def fork(self, src: int, dst: int, end: int) -> None:
        self.contexts.fork(src, dst, end)

    def release(self, row: int) -> None:
        self.contexts.release(row)

    def growth(self, row: int, positions: int) -> int:
        return self.contexts.growth(row, positions)

    @property
    def bytes(self) -> int:
        return self.contexts.bytes

    def check(self, rows: Sequence[int]) -> None:
        self.contexts.check(rows)

    def close(self) -> None:
        self.contexts.close()
