"""A file of packed weights: what packing made once, written so that any number of processes can map it.

Layout: MAGIC, the header's length (8 bytes, little-endian), its SHA-256, a JSON header; zeros up to byte BLOCK; from
there the matrices, each on a page's boundary, as they lie in memory. Only what packing makes is here: sizes, norms and
biases are read from the model's own files. The file is written in aligned blocks of a huge page, in which the system
then holds and maps it, and every block has a checksum.

What is read is never taken on trust. All checksums are compared before any weight is used: that costs a fraction of
what packing does, since the threads read at the memory's speed what the first forward would touch anyway. And a first
and a last row of each matrix are packed afresh from the model's file and compared, so that neither another layout nor
other contents can pass for these.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from outpace import _fast
from outpace.common.files import replacing
from outpace.models.weights.file_bytes import JoinedTensor, StoredTensor

_native = _fast.native

MAGIC = b"OUTPACEW"
BLOCK = 2 << 20  # bytes: a huge page
_PAGE = 4096
_LEAD = len(MAGIC) + 8 + 32  # before the header


class UnusableError(Exception):
    """A file that cannot be taken for the weights; the message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix to be packed: where it lies in the model's file, and everything that packing needs to know."""

    stored: StoredTensor | JoinedTensor
    type: int  # as GGUF counts them
    rows: int
    cols: int
    heads: int
    target: str

    @property
    def facts(self) -> list[Any]:
        return [self.type, self.rows, self.cols, self.heads, self.target]


Make = Callable[[str, Source], _native.Matrix]  # a matrix by name: packed, or found


class Packer:
    """Packs matrices, with so many threads, and keeps them by name."""

    def __init__(self, threads: int) -> None:
        self._arena, self._threads = _native.Arena(), threads
        self.made: dict[str, tuple[_native.Matrix, list[Any]]] = {}

    def __call__(self, name: str, source: Source) -> _native.Matrix:
        """Raises ValueError for what the runtime refuses."""
        shape = source.rows, source.cols, source.heads
        matrix = _native.pack(self._arena, source.stored.data, source.type, *shape, source.target, self._threads)
        self.made[name] = matrix, source.facts
        return matrix


class PackedFile:
    """Finds matrices in a file. Raises FileNotFoundError, and UnusableError for anything that is not right with it."""

    def __init__(self, path: Path, key: Mapping[str, Any], threads: int) -> None:
        try:
            with path.open("rb") as file:
                self._header = read_header(file)
                if self._header["key"] != key:
                    raise UnusableError("it was made of other files or by another version")
                self._file = _native.PackedFile(file.fileno(), self._header["end"])
            if self._file.checksums(BLOCK, BLOCK, threads) != self._header["checksums"]:
                raise UnusableError("its contents have changed since they were written")
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: what the mapping says of the disk
            raise UnusableError(str(error)) from error

    @property
    def bytes(self) -> int:
        end: int = self._header["end"]
        return end

    @property
    def huge(self) -> float:
        """The share that the system maps in huge pages."""
        share: float = self._file.huge
        return share

    def copy(self, threads: int) -> None:
        """Into memory of this process alone, in huge pages; before any matrix is found. Raises MemoryError."""
        self._file.copy(threads)

    def __call__(self, name: str, source: Source) -> _native.Matrix:
        offset, size, *facts = self._header["matrices"].get(name) or [0, 0]
        if facts != source.facts:
            raise UnusableError(f"it has another {name}")
        try:
            matrix = _native.mapped_matrix(self._file, offset, source.type, source.rows, source.cols, source.target)
            stride = _native.row_bytes(source.type, source.cols)
            same = matrix.bytes == size and all(
                matrix.row_is(row, source.stored.part(row * stride, stride), source.type, source.target)
                for row in (0, source.rows - 1)  # which stay in their places when heads are reordered
            )
        except (ValueError, TypeError) as error:
            raise UnusableError(f"its {name} is malformed: {error}") from error
        if not same:
            raise UnusableError(f"its {name} is not what the model's file has")
        return matrix


def read_header(file: BinaryIO) -> dict[str, Any]:
    """What a file says of itself: key, name, matrices, checksums, end. Raises UnusableError, OSError."""
    lead = file.read(_LEAD)
    length = int.from_bytes(lead[len(MAGIC) : len(MAGIC) + 8], "little")
    if not lead.startswith(MAGIC) or len(lead) < _LEAD or length > BLOCK - _LEAD:
        raise UnusableError("it is no file of packed weights")
    text = file.read(length)
    if hashlib.sha256(text).digest() != lead[-32:]:
        raise UnusableError("its header is damaged")
    header: dict[str, Any] = json.loads(text)  # as it was written, so it is whole
    if os.fstat(file.fileno()).st_size != header["end"]:
        raise UnusableError("it is cut off")
    return header


def size_of(made: Mapping[str, tuple[_native.Matrix, list[Any]]]) -> int:
    """Bytes of the file that ``write`` would make."""
    total: int = BLOCK + sum(-(-matrix.bytes // _PAGE) * _PAGE for matrix, _ in made.values())
    return total


def write(path: Path, name: str, key: Mapping[str, Any], made: Mapping[str, tuple[_native.Matrix, list[Any]]]) -> None:
    """Write what a ``Packer`` made, whole or not at all. Raises OSError.

    It is not waited for until it is on the disk: after a power failure its checksums tell.
    """
    with replacing(path, mode=0o444, durable=False) as file:
        file.seek(BLOCK)
        blocks = _Blocks(file)
        matrices = {}
        for what, (matrix, facts) in made.items():
            blocks.align()
            matrices[what] = [blocks.at, matrix.bytes, *facts]
            blocks.add(matrix.packed)
        blocks.flush()
        text = json.dumps(
            {"key": key, "name": name, "matrices": matrices, "checksums": blocks.checksums, "end": blocks.at}
        ).encode()
        if len(text) > BLOCK - _LEAD:
            raise OSError(f"a header of {len(text)} bytes does not fit")
        file.seek(0)
        file.write(MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text)


class _Blocks:
    """Bytes on their way into whole aligned blocks."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._block, self._used = file, np.zeros(BLOCK, np.uint8), 0
        self.at = BLOCK  # in the file
        self.checksums: list[int] = []

    def add(self, data: npt.NDArray[np.uint8]) -> None:
        while len(data):
            n = min(BLOCK - self._used, len(data))
            self._block[self._used : self._used + n] = data[:n]
            self._used, self.at, data = self._used + n, self.at + n, data[n:]
            if self._used == BLOCK:
                self.flush()

    def align(self) -> None:
        self.add(np.zeros(-self.at % _PAGE, np.uint8))

    def flush(self) -> None:
        if self._used:
            block = self._block[: self._used]
            self.checksums.append(_native.checksum(block))
            self._file.write(block.data)
            self._used = 0
