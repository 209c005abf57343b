"""A file's bytes, read piece by piece rather than mapped: one that is cut short meanwhile is an error, not a signal."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from outpace.errors import ModelError

_POINTER, _LARGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024  # how one begins; bytes


class Bytes(Protocol):
    """Where tensors lie: a file, or the memory of another library."""

    def read(self, start: int, n: int) -> npt.NDArray[np.uint8]:
        """uint8 [n], bytes ``start`` to ``start + n``. Raises ModelError where they are not there."""
        ...


class FileBytes:
    """An open file of ``size`` bytes, closed with the last reference. Raises ModelError that names it.

    It stays open, so that another file in its place is not taken for it. ``read`` may be called from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # of the file's position, where reading moves it
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} cannot be read: it is not a regular file")
        self.size = status.st_size
        refuse_pointer(path, self.size)

    def read(self, start: int, n: int) -> npt.NDArray[np.uint8]:
        """uint8 [n], bytes ``start`` to ``start + n`` of the file. Raises ModelError where they are no longer there."""
        data = np.empty(n, np.uint8)
        view, at = data.data, 0
        try:
            while at < n and (got := self._into(view[at:], start + at)):
                at += got
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if at < n:
            raise ModelError(
                f"{self.path} ends at byte {start + at} now, and had {self.size}: it was cut short while it was read; "
                "get it again, and load it when it is whole"
            )
        return data

    def _into(self, view: memoryview, start: int) -> int:
        """Bytes that were read from ``start`` on; 0 at the end."""
        if hasattr(os, "preadv"):  # a forked child has the same position as its parent
            return os.preadv(self._file.fileno(), [view], start)
        with self._lock:
            self._file.seek(start)
            return self._file.readinto(view) or 0


def refuse_pointer(path: Path, size: int) -> None:
    """Raise ModelError for what Git leaves in a large file's place where its LFS extension is not installed."""
    if size > _LARGEST_POINTER:
        return
    try:
        start = path.read_bytes()[: len(_POINTER)]
    except OSError:  # whoever reads it says why
        return
    if start == _POINTER:
        raise ModelError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` there, or download the file")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file; its type ("BF16", "Q4_K", ...) and its shape in numpy's order."""

    type: str
    shape: tuple[int, ...]
    file: Bytes
    start: int
    n_bytes: int

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Its bytes, uint8 [n_bytes], read now. Raises ModelError for a file that was cut short."""
        return self.file.read(self.start, self.n_bytes)

    def part(self, begin: int, n: int) -> npt.NDArray[np.uint8]:
        """``n`` of its bytes from ``begin`` on; as ``data``."""
        return self.file.read(self.start + begin, n)


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A matrix that several pieces of ``rows`` rows make, one behind the other, each followed by ``padding`` rows of
    zeros. ``read(i)``: the bytes of piece i, uint8 [n], read now."""

    type: str
    columns: int
    pieces: int
    rows: int
    padding: int
    read: Callable[[int], npt.NDArray[np.uint8]]

    @property
    def shape(self) -> tuple[int, int]:
        return self.pieces * (self.rows + self.padding), self.columns

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Its bytes, uint8 [n_bytes], read now. Raises ModelError as ``read`` does."""
        return np.concatenate([self._piece(i) for i in range(self.pieces)])

    def part(self, begin: int, n: int) -> npt.NDArray[np.uint8]:
        """``n`` of its bytes from ``begin`` on, which lie in one piece; as ``data``."""
        first = self._piece(0)
        piece, at = divmod(begin, len(first))
        return (first if piece == 0 else self._piece(piece))[at : at + n]

    def _piece(self, i: int) -> npt.NDArray[np.uint8]:
        values = self.read(i)
        return np.pad(values, (0, len(values) // self.rows * self.padding)) if self.padding else values
