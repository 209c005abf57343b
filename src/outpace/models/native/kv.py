"""The native runtime's KV cache behind the ``KVCache`` seam."""

from __future__ import annotations

from collections.abc import Sequence

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

    def __init__(self, handle: _fast.native.Model, limit: int | None) -> None:
        self._handle: _fast.native.Model | None = handle
        self._limit = limit

    @property
    def block(self) -> int:
        return _fast.native.KV_BLOCK

    def alloc(self) -> int:
        return self._live().kv_alloc()

    def free(self, row: int) -> None:
        self._live().kv_free(row)

    def length(self, row: int) -> int:
        return self._live().kv_length(row)

    def truncate(self, row: int, n: int) -> None:
        self._live().kv_truncate(row, n)

    def compact(self, row: int, start: int, keep: I32) -> None:
        try:
            self._live().kv_compact(row, start, np.ascontiguousarray(keep, np.int32))
        except _fast.native.MemoryLimit as error:
            raise MemoryLimitError(str(error)) from error

    def settle(self, rows: _fast.native.Rows) -> list[tuple[int, str]]:
        return rows.settle(self._live())

    def fork(self, src: int, dst: int, n: int) -> None:
        self._live().kv_fork(src, dst, n)

    def growth(self, row: int, n: int) -> int:
        """See ``KVCache.growth``. Rows that share their last block and grow together may take less than the sum."""
        return self._live().kv_growth(row, n)

    def bytes_for(self, positions: int) -> int:
        return self._live().kv_bytes_for(positions)

    def exclusive(self, rows: Sequence[int]) -> int:
        return self._live().kv_exclusive(list(rows))

    @property
    def bytes(self) -> int:
        return self._live().kv_bytes

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def rows(self) -> list[int]:
        return self._live().kv_rows

    def check(self) -> None:
        try:
            self._live().kv_check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from error

    def close(self) -> None:
        self._handle = None

    def _live(self) -> _fast.native.Model:
        if self._handle is None:
            raise ValueError("this model is closed: load it again")
        return self._handle
