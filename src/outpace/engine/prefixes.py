"""Rows whose KV is kept when their requests have ended, for requests that begin alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from outpace.common.arrays import I32, common_prefix

PIECE = 16  # tokens that are hashed together: a shorter common beginning is not found


class PrefixCache:
    """Finished rows whose KV stays for requests that begin alike, found by hashing pieces of tokens.

    Rows share blocks by reference, so a kept row costs only what no other row has. Least recently used goes first. A
    row is found within its scope alone (Request.cache_scope). It owns no memory. ``most``: rows that are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows: OrderedDict[int, I32] = OrderedDict()  # tokens whose KV is there; least recently used first
        self._scopes: dict[int, str] = {}  # of the rows
        self._index: dict[int, int] = {}  # hash of a beginning -> a row that has it

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[int]:
        """Kept rows, the least recently used first."""
        return list(self._rows)

    def keep(self, row: int, tokens: I32, scope: str = "") -> None:
        """``row`` holds KV for ``tokens`` int32 [n] and stays."""
        self._rows[row] = tokens.copy()
        self._scopes[row] = scope
        for key in _keys(tokens, scope):
            self._index[key] = row

    def find(self, tokens: I32, reachable: Callable[[int, int], int], scope: str = "") -> tuple[int, int, int]:
        """The kept row of ``scope`` from which most of the beginning of ``tokens`` int32 [n] can be had; how much; and
        how many tokens the row that begins most like them shares. (-1, 0, 0): none.

        ``reachable(row, n)``: the longest beginning of ``row``, of at most n positions, at which it can be forked.
        """
        found = -1
        for key in _keys(tokens, scope):
            row = self._index.get(key, -1)
            if row < 0:
                break
            found = row
        if found < 0 or self._scopes[found] != scope:  # hashes may collide; scopes and tokens do not
            return -1, 0, 0
        common = common_prefix(tokens, self._rows[found])
        if common < PIECE:
            return -1, 0, 0
        shared = reachable(found, common)
        for row, kept in self._rows.items():  # what is more alike may have to be cut further back
            if shared < common and row != found and self._scopes[row] == scope:
                ready = reachable(row, common_prefix(tokens, kept))
                found, shared = (row, ready) if ready > shared else (found, shared)
        return found, shared, common

    def tokens(self, row: int) -> I32:
        """What a kept row has KV of, int32 [n]."""
        return self._rows[row]

    def scope(self, row: int) -> str:
        """Within which a kept row is found."""
        return self._scopes[row]

    def used(self, row: int) -> None:
        """The row has just served."""
        self._rows.move_to_end(row)

    def forget(self, row: int) -> None:
        """The row is gone."""
        tokens, scope = self._rows.pop(row), self._scopes.pop(row)
        for key in _keys(tokens, scope):
            if self._index.get(key) == row:
                del self._index[key]
        for other, kept in self._rows.items():  # beginnings that another row has too
            alike = len(kept) >= PIECE and len(tokens) >= PIECE and (kept[:PIECE] == tokens[:PIECE]).all()
            if alike and self._scopes[other] == scope:
                for key in _keys(kept, scope):
                    self._index.setdefault(key, other)

    def fault(self, rows: set[int]) -> str | None:
        """What is wrong unless every kept row is one of ``rows`` and can be found, and the index names no other."""
        if len(self._rows) > self.most or not rows >= set(self._rows) == set(self._scopes):
            return "a kept prefix has no row, or is one too many"
        if not set(self._index.values()) <= set(self._rows):
            return "the index of prefixes names a row that is not kept"
        if not all(
            key in self._index for row, tokens in self._rows.items() for key in _keys(tokens, self._scopes[row])
        ):
            return "a kept prefix cannot be found"
        return None


def _keys(tokens: I32, scope: str) -> list[int]:
    """Hashes of the first 16, 32, 48, ... tokens, within ``scope``."""
    data, key, keys = tokens.tobytes(), hash(scope), []
    for at in range(0, len(tokens) - PIECE + 1, PIECE):
        key = hash((key, data[4 * at : 4 * (at + PIECE)]))
        keys.append(key)
    return keys
