"""The native runtime's KV cache behind the ``KVCache`` seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outpace import _fast
from outpace.common.arrays import I32
from outpace.errors import MemoryLimitError
from outpace.models.base import KVCache


class NativeKV(KVCache):
    """The rows' keys and values; see ``KVCache``. Calls wait for a forward that another thread runs.

    ValueError for a position or count that a row does not have, IndexError for a row that is not in use. ``compact``
    raises MemoryLimitError, and changes nothing, where it would have to copy a shared block beyond the limit.
    """

    def __init__(self, handle: Any, limit: int | None) -> None:
        self._handle = handle
        self._limit = limit

    @property
    def block(self) -> int:
        n: int = _fast.native.KV_BLOCK
        return n

    def alloc(self) -> int:
        row: int = self._live().kv_alloc()
        return row

    def free(self, row: int) -> None:
        self._live().kv_free(row)

    def length(self, row: int) -> int:
        n: int = self._live().kv_length(row)
        return n

    def truncate(self, row: int, n: int) -> None:
        self._live().kv_truncate(row, n)

    def compact(self, row: int, start: int, keep: I32) -> None:
        try:
            self._live().kv_compact(row, start, np.ascontiguousarray(keep, np.int32))
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    def settle(self, rows: Any) -> list[tuple[int, str]]:
        lost: list[tuple[int, str]] = rows.settle(self._live())
        return lost

    def fork(self, src: int, dst: int, n: int) -> None:
        self._live().kv_fork(src, dst, n)

    def growth(self, row: int, n: int) -> int:
        """See ``KVCache.growth``. Rows that share their last block and grow together may take less than the sum."""
        more: int = self._live().kv_growth(row, n)
        return more

    def bytes_for(self, positions: int) -> int:
        n: int = self._live().kv_bytes_for(positions)
        return n

    def exclusive(self, rows: Sequence[int]) -> int:
        n: int = self._live().kv_exclusive(list(rows))
        return n

    @property
    def bytes(self) -> int:
        n: int = self._live().kv_bytes
        return n

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def rows(self) -> list[int]:
        used: list[int] = self._live().kv_rows
        return used

    def check(self) -> None:
        try:
            self._live().kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        self._handle = None

    def _live(self) -> Any:
        if self._handle is None:
            raise ValueError("this model is closed: load it again")
        return self._handle
