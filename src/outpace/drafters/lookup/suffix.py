"""``suffix``: SuffixDecoding (arXiv 2411.04975): what followed earlier appearances of the sequence's end, as a tree.

Every row has an index of its own tokens, gone when the row is. With ``history`` finished outputs are kept for later
requests; that is off unless asked for, since one user's answers then show in how fast another is answered.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outpace import _fast
from outpace.common.arrays import I32
from outpace.common.files import StrPath, write_bytes
from outpace.drafters.base import DraftContext, LookupDrafter
from outpace.drafters.lookup.datastore import END
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError

MAGIC = b"OUTPACE-SUFFIX-1"
_HEADER = struct.Struct("<16sIII")  # magic, vocabulary, tokens, their CRC-32

NEAREST = 32  # newest places looked at for the last pair of tokens
FEW = 8  # with fewer than that, also so many newest places of the last token alone
PLACE_BYTES = 400  # what a token takes at most, with its share of the tables

# Each place where the context appeared votes with the odds that one place with a match of that length (0 to 12 and
# more tokens) is right, measured on outputs of the demo model (docs/notebook.md); DOUBT is "something else".
WEIGHTS = (0.0, 0.25, 1.0, 1.4, 2.2, 2.4, 2.8, 3.5, 4.0, 5.0, 5.0, 6.0, 19.0)
DOUBT = 1.0


class SuffixDrafter(LookupDrafter):
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
        self._vocab, self._file = vocab, file
        self._capacity = memory // PLACE_BYTES
        index = (self._capacity, most, NEAREST, FEW, WEIGHTS, DOUBT)
        self._history = _fast.native.SuffixIndex(*index) if history else None
        self._rows = _fast.native.SuffixRows(*index, tree, self._history)
        super().__init__(self._rows)
        if file is not None and Path(file).exists():
            self.load(file)

    @property
    def places(self) -> int:
        """Tokens indexed or kept now; each takes at most ``PLACE_BYTES``."""
        return self._rows.places

    def release(self, row: int, tokens: I32 | None = None) -> None:
        """With a history, the output of a row that ended well and was ever asked to draft goes into it."""
        prompt = self._rows.release(row)
        if prompt >= 0 and self._history is not None and tokens is not None and len(tokens) > prompt:
            self._history.append(np.append(tokens[prompt:], np.int32(END)))
            self._rows.bound()

    def check(self, rows: Sequence[int]) -> None:
        by_row = self._rows.rows()
        assert set(by_row) <= set(rows), f"rows {set(by_row) - set(rows)} were never released"
        assert self.places <= self._capacity, f"{self.places} tokens are kept, the bound is {self._capacity}"
        for places, known in by_row.values():
            assert places <= known

    def close(self) -> None:
        for row in self._rows.rows():
            self.release(row)
        if self._file is not None:
            self.save(self._file)
            self._file = None

    def snapshot(self) -> I32:
        """The history as it is now, for ``save`` in another thread. Raises DrafterError."""
        return self._kept().tokens()

    def save(self, path: StrPath, tokens: I32 | None = None) -> None:
        """Write the history, or a snapshot of it, to ``path``, all of it or nothing. Raises DrafterError."""
        if tokens is None:
            tokens = self.snapshot()
        body = tokens.astype("<i4").tobytes()
        header = _HEADER.pack(MAGIC, self._vocab, len(tokens), zlib.crc32(body))
        try:
            write_bytes(Path(path), header + body, mode=0o600)  # users' answers are for its owner only
        except OSError as error:
            raise DrafterError(
                f"suffix: {path} cannot be written ({error.strerror}): give a folder that can"
            ) from error

    def load(self, path: StrPath) -> None:
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
        history.append(tokens.astype(np.int32))
        self._rows.bound()

    def _kept(self) -> _fast.native.SuffixIndex:
        if self._history is None:
            raise DrafterError("suffix keeps no history: add history=1 to save or load it")
        return self._history


def build(spec: DrafterSpec, context: DraftContext) -> SuffixDrafter:
    return SuffixDrafter(
        tree=spec.flag("tree", True),
        history=spec.flag("history", False),
        vocab=context.target.info.vocab_size,
        file=spec.options.get("file"),
        **spec.given(most="max"),
        **spec.memory(),
    )
