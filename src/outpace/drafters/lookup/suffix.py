"""``suffix``: SuffixDecoding (arXiv 2411.04975): what followed earlier appearances of the sequence's end, as a tree.

Every row has an index of its own tokens, gone when the row is. With ``history`` finished outputs are kept for later
requests; that is off unless asked for, since what one user was told then shows in how fast another is answered.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outpace.drafters.base import Event, RowView, TreeDrafter
from outpace.drafters.lookup.suffix_index import PLACE_BYTES
from outpace.drafters.lookup.votes import END
from outpace.errors import DrafterError
from outpace.exact.tree import Tree

if TYPE_CHECKING:
    from outpace.drafters.lookup.suffix_index import SuffixIndex
else:
    try:
        from outpace.drafters.lookup.suffix_native import NativeSuffixIndex as SuffixIndex
    except ImportError:  # no extension, or one from before it had the index: the reference, slower
        from outpace.drafters.lookup.suffix_index import SuffixIndex

MAGIC = b"OUTPACE-SUFFIX-1"
_HEADER = struct.Struct("<16sIII")  # magic, vocabulary, tokens, their CRC-32


@dataclass(slots=True)
class _Row:
    index: SuffixIndex
    request: int
    known: int  # committed tokens that the index has seen
    prompt: int  # of these, the prompt's
    output: list[int]  # for the history


class SuffixDrafter(TreeDrafter):
    """Trees (or chains) by counting continuations. ``memory``: bytes that all indexes may take together.

    ``most``: longest match that counts; ``vocab``: size of the target's vocabulary. Raises DrafterError.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        most: int = 16,
        memory: int = 64 << 20,
        tree: bool = True,
        history: bool = False,
        vocab: int = 2**31 - 1,
        file: str | None = None,
    ) -> None:
        if not 2 <= most <= 64:
            raise DrafterError(f"suffix: max={most} is out of range: give 2 to 64 tokens")
        if memory < 1 << 20:
            raise DrafterError(f"suffix: memory is {memory} bytes: give at least memory=1 (MiB)")
        if file is not None and not history:
            raise DrafterError(f"suffix: file={file} keeps the history, which is off: add history=1")
        self._most, self._tree, self._vocab, self._file = most, tree, vocab, file
        self._capacity = memory // PLACE_BYTES
        self._rows: dict[int, _Row] = {}
        self._history = SuffixIndex(self._capacity, most) if history else None
        if file is not None and Path(file).exists():
            self.load(file)

    def trees(self, rows: Sequence[RowView], sizes: Sequence[int]) -> list[Tree]:
        others = [self._history] if self._history is not None and len(self._history) else []
        trees = []
        for view, size in zip(rows, sizes, strict=True):
            row = self._rows.get(view.row)
            if row is None or row.request != view.request:
                index = SuffixIndex(self._capacity, self._most)
                row = _Row(index, view.request, 0, len(view.tokens) - view.chooser.index, [])
                self._rows[view.row] = row
            if row.known < len(view.tokens):
                self._learn(row, view.tokens[row.known :].tolist())
            context = view.tokens[-self._most :].tolist()
            trees.append(row.index.propose(context, size, others, self._tree))
        self._bound()
        return trees

    def observe(self, events: Sequence[Event]) -> None:
        if self._history is None:
            return  # a row learns what it missed when it is asked to draft: while it is not, it costs nothing
        for event in events:
            row = self._rows.get(event.row)
            if row is not None and event.verdict is not None and event.start == row.known:
                self._learn(row, event.tokens.tolist())
        self._bound()

    def _learn(self, row: _Row, tokens: list[int]) -> None:
        row.index.append(tokens)
        if self._history is not None:
            row.output.extend(tokens[max(0, row.prompt - row.known) :])
        row.known += len(tokens)

    def _bound(self) -> None:
        """Forget until everything fits: the history first, then the older half of the largest row."""
        while self.places > self._capacity:
            if self._history is not None and len(self._history):
                self._history.shrink(len(self._history) // 2)
            else:
                row = max(self._rows.values(), key=lambda r: len(r.index) + len(r.output))
                row.index.shrink(len(row.index) // 2)
                del row.output[: (len(row.output) + 1) // 2]

    @property
    def places(self) -> int:
        """Tokens indexed or kept now; each takes at most ``PLACE_BYTES``."""
        rows = sum(len(row.index) + len(row.output) for row in self._rows.values())
        return rows + (len(self._history) if self._history is not None else 0)

    def release(self, row: int) -> None:
        gone = self._rows.pop(row, None)
        if gone is not None and self._history is not None and gone.output:
            self._history.append([*gone.output, END])
            self._bound()

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"
        assert self.places <= self._capacity, f"{self.places} tokens are kept, the bound is {self._capacity}"
        for row in self._rows.values():
            assert len(row.index) <= row.known

    def close(self) -> None:
        for row in list(self._rows):
            self.release(row)
        if self._file is not None:
            self.save(self._file)
            self._file = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history to ``path``, all of it or nothing. Raises DrafterError."""
        history = self._kept()
        body = np.array(history.tokens, "<i4").tobytes()
        header = _HEADER.pack(MAGIC, self._vocab, len(history), zlib.crc32(body))
        target = Path(path)
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.")
            with os.fdopen(handle, "wb") as out:
                out.write(header + body)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, target)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise DrafterError(
                f"suffix: {path} cannot be written ({error.strerror}): give a folder that can"
            ) from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the history by what ``save`` wrote. Raises DrafterError; then the history is as it was."""
        history = self._kept()
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise DrafterError(f"suffix: {path} cannot be read ({error.strerror}): check the path") from error
        body = data[_HEADER.size :]
        magic, vocab, count, crc = _HEADER.unpack(data[: _HEADER.size]) if len(data) >= _HEADER.size else (b"", 0, 0, 0)
        if magic != MAGIC or len(body) != 4 * count or zlib.crc32(body) != crc:
            raise DrafterError(f"suffix: {path} is damaged or no suffix history: delete it, and it will be made anew")
        tokens = np.frombuffer(body, "<i4")
        if vocab != self._vocab or ((tokens < END) | (tokens >= vocab)).any():
            raise DrafterError(
                f"suffix: {path} is of a model with {vocab} tokens, this one has {self._vocab}: "
                "use a file for each model"
            )
        history.shrink(0)
        history.append(tokens.tolist())
        self._bound()

    def _kept(self) -> SuffixIndex:
        if self._history is None:
            raise DrafterError("suffix keeps no history: add history=1 to save or load it")
        return self._history
