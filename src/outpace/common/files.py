"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from outpace.errors import ModelError, ParameterError

StrPath = str | os.PathLike[str]  # what a public call takes where it takes a path

SPARE = 1 << 30  # bytes of the disk that folders which grow by themselves leave to others
_ABANDONED = 3600.0  # seconds after which a half-written file has lost its writer


_BEGINS = {
    "HTML": (b"<!doctype html",),
    "PNG": (b"\x89PNG",),
    "SVG": (b"<?xml", b"<svg"),
}  # in small letters, where text


def check_writable(path: Path, kind: str) -> None:
    """Raise ParameterError now if ``path`` could not be written later, or is a file that is none of ``kind`` ("JSON",
    "JSON lines", "HTML", "PNG", "SVG"), which would be lost."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ParameterError(f"{path} cannot be written: give a file in a folder that exists and is writable")
    if path.is_file() and path.stat().st_size and not _is(path, kind):
        raise ParameterError(f"{path} is there already, and is no {kind}: give another name, or delete that file first")


def _is(path: Path, kind: str) -> bool:
    try:
        with path.open("rb") as file:
            if kind in _BEGINS:
                head = file.read(256).lstrip()
                return head.startswith(_BEGINS[kind]) or head.lower().startswith(_BEGINS[kind])
            return isinstance(json.loads(file.readline() if kind == "JSON lines" else file.read()), (dict, list))
    except (OSError, ValueError, RecursionError):
        return False


@contextmanager
def replacing(path: Path, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write bytes to, which takes ``path``'s place when the block ends: whole, on the disk, or not at all.

    What is there keeps its permissions; ``mode`` has those of a new file. ``durable=False``: the disk is not
    waited for, so that a power failure may leave less than was written. Raises OSError.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.chmod(stat.S_IMODE(path.stat().st_mode) if path.exists() else mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sweep(parts: Iterable[Path]) -> None:
    """Delete those of half-written files whose writer is gone, by their age: ``parts``."""
    for part in parts:
        with suppress(OSError):  # it may have been finished, or another process does the same
            if time.time() - part.stat().st_mtime > _ABANDONED:
                part.unlink()


def crowded(folder: Path, size: int) -> bool:
    """Whether a file of ``size`` bytes in ``folder`` would leave less than SPARE to the disk's other users. Raises
    OSError."""
    return shutil.disk_usage(folder).free < size + SPARE


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep every other process, and every other caller in this one, that locks the file ``path`` waiting until the
    block ends. A process that is killed gives the lock up. The file is made, and stays. Raises OSError."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                    break
                except OSError as error:
                    if error.errno != errno.EDEADLK:  # which it says after ten seconds
                        raise
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file, whole or not at all; ``mode``: permissions of a new one. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all. Raises OSError."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode("utf-8"))


def expanded(name: str) -> Path:
    """The path ``name``, in which ``~`` is a user's home. Raises ModelError for one who has none."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{name}: this machine has no such user: check the path") from error


def cache_dir() -> Path:
    """Where derived files are kept: ``OUTPACE_CACHE``, or ``~/.cache/outpace``."""
    named = os.environ.get("OUTPACE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "outpace"
