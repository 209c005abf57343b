"""A folder of files that outlive the process: checked when they are read, bounded, written by a thread of its own.

A file is MAGIC, a checksum of all that follows (8 bytes), its name's digest and its contents. Files are written beside
their place and renamed, so that servers may share a folder and be killed at any time. Reading one marks it as used;
what was not used for longest goes first. Nothing that goes wrong here is an error: it is logged, and the caller does
without.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outpace import _fast
from outpace.common.files import SPARE, StrPath, crowded, expanded, replacing, sweep, write_json
from outpace.common.parameter import Amount
from outpace.common.units import format_bytes
from outpace.errors import Argument, ModelError, ParameterError

log = logging.getLogger(__name__)

LIMIT = 8 << 30  # bytes of all files, or a tenth of what is free on the disk, if that is less
MAGIC = b"OUTPACEK"
BLOCK, WINDOW, STATE = ".block", ".window", ".state"  # ends of the files' names
_HOME = _NAME = "[0-9a-f]" * 32  # of a model's folder, of a file's name: what else is there is not ours
_LEAD = len(MAGIC) + 8 + 16
_WAITING = 256 << 20  # bytes that wait to be written, at most
_SILENT = 60.0  # seconds for which the same trouble is not logged again
_SHARE = 16  # the folder is looked through after so small a part of the limit: other processes write, too


@dataclass(frozen=True, slots=True)
class Counts:
    """What was done so far: beginnings found on the disk and their tokens, bytes read and written, files deleted for
    the bound, and files that were damaged."""

    hits: int = 0
    tokens: int = 0
    read: int = 0
    written: int = 0
    evicted: int = 0
    damaged: int = 0


def checked_limit(folder: StrPath, size: int | str | None) -> int:
    """Bytes that files in ``folder``, which is made, may take. Raises ParameterError."""
    try:
        folder = expanded(os.fspath(folder))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        free = shutil.disk_usage(folder).free
    except (OSError, TypeError, ModelError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ParameterError(
            Argument("cache_dir", str(folder)), f" cannot be used ({why}): give a folder that is writable"
        ) from error
    if size is None:
        return min(LIMIT, free // 10)
    return Amount(1, remedy="give more, or leave it out").checked("cache_size", size)


class KVFiles:
    """Files of one model, in ``folder / model``. ``limit``: bytes of all files in ``folder``, of whichever model;
    ``about``: which model it is, for people. Only ``close`` and the thread that it ends wait for the disk."""

    def __init__(self, folder: StrPath, model: str, limit: int, about: dict[str, object]) -> None:
        self._root, self.limit = Path(folder), limit
        self._home = self._root / model
        self._quiet_until = 0.0
        try:
            self._home.mkdir(mode=0o700, exist_ok=True)
            (self._home / "states").mkdir(mode=0o700, exist_ok=True)
            write_json(self._home / "model.json", about)
        except OSError as error:
            self._trouble(f"KV cannot be kept in {folder}: {error.strerror}")
        self.read_bytes = self.written = self.evicted = self.damaged = 0
        self._lock = threading.Condition()
        self._jobs: deque[tuple[str, Sequence[bytes]] | Callable[[], None]] = deque()
        self._waiting: dict[str, int] = {}  # bytes of files that are still to be written
        self._thread: threading.Thread | None = None
        self._closing = False
        self._total, self._since = self._look()  # bytes there were, and those that were written since
        self._listed: tuple[int, dict[str, list[str]]] = -1, {}

    @property
    def size(self) -> int:
        """Of all files, as far as this process knows."""
        return self._total + self._since

    def has(self, name: str) -> bool:
        """Whether the file is there, or will be soon."""
        return name in self._waiting or os.path.exists(self._home / name)

    def states(self, key: str) -> list[str]:
        """Names of files of states whose names begin with ``key``."""
        where = self._home / "states"
        try:
            changed = where.stat().st_mtime_ns
            if changed != self._listed[0]:
                found: dict[str, list[str]] = {}
                for name in os.listdir(where):
                    if name.endswith(STATE):
                        found.setdefault(name.split("-")[0], []).append(f"states/{name}")
                self._listed = changed, found
        except OSError:
            return []
        return self._listed[1].get(key, [])

    def read(self, name: str, size: int) -> memoryview | None:
        """The contents of a file, which must have so many bytes. None where there is none; one that cannot be what was
        written is deleted."""
        path = self._home / name
        try:
            with open(path, "rb", opener=_unhindered) as file:
                data = file.read(_LEAD + size + 1) or b""
        except FileNotFoundError:
            return None
        except OSError as error:
            self._trouble(f"{path} cannot be read: {error.strerror}")
            return None
        contents = memoryview(data)[_LEAD:]
        if len(contents) != size or data[:_LEAD] != _lead(name, contents):
            self.damaged += 1
            log.warning("%s is damaged, so it is deleted and its tokens are computed again", path)
            with suppress(OSError):
                path.unlink()
            return None
        self.read_bytes += size
        return contents

    def write(self, name: str, contents: Sequence[bytes], wait: bool = False) -> bool:
        """Have a file written. False where too much waits already; ``wait``: until it does not."""
        size = sum(map(len, contents))
        with self._lock:
            while self._waiting and sum(self._waiting.values()) + size > _WAITING:
                if not wait:
                    return False
                self._lock.wait()
            self._waiting[name] = size
        self._later((name, contents))
        return True

    def used(self, names: Sequence[str]) -> None:
        """These files, of a beginning and what follows it, have just served: the last goes first."""
        now = time.time_ns()

        def mark() -> None:
            for i, name in enumerate(names):
                with suppress(OSError):
                    os.utime(self._home / name, ns=(now - 1000 * i,) * 2)

        self._later(mark)

    def close(self) -> None:
        """Write what waits. Calling twice is allowed."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _later(self, job: tuple[str, Sequence[bytes]] | Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="outpace-kv-files", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._jobs:
                    if self._closing:
                        return
                    self._lock.wait()
                job = self._jobs.popleft()
            if not isinstance(job, tuple):
                job()
                continue
            try:
                self._write(*job)
            except (OSError, MemoryError) as error:
                why = getattr(error, "strerror", None) or str(error) or "out of memory"
                self._trouble(f"KV is not kept in {self._root}: {why}")
            finally:
                with self._lock:
                    self._waiting.pop(job[0], None)
                    self._lock.notify_all()

    def _write(self, name: str, contents: Sequence[bytes]) -> None:
        data = b"".join(contents)
        self._make_room(_LEAD + len(data))
        with replacing(self._home / name, 0o600, durable=False) as file:
            file.write(_lead(name, data))
            file.write(data)
        self._since += _LEAD + len(data)
        self.written += len(data)

    def _make_room(self, size: int) -> None:
        """Delete what was not used for longest. Raises OSError where there is no room even so."""
        full = crowded(self._root, size)
        if not full and self._since + size <= self.limit // _SHARE and self.size + size <= self.limit:
            return
        self._total, self._since = self._look()
        if full or self.size + size > self.limit:
            for path, stat in sorted(files(self._root), key=lambda each: each[1].st_mtime_ns):
                if self.size + size <= self.limit * (_SHARE - 1) // _SHARE and not full:
                    break
                with suppress(FileNotFoundError):
                    path.unlink()
                    self.evicted += 1
                self._total -= stat.st_size
                full = full and crowded(self._root, size)
        if full or self.size + size > self.limit:
            left = f"{format_bytes(SPARE)} of which stay free" if full else f"of {format_bytes(self.limit)}"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {left}")

    def _look(self) -> tuple[int, int]:
        for pattern in (f"{_HOME}/.{_NAME}.*.tmp", f"{_HOME}/states/.{_NAME}-*.tmp"):
            sweep(self._root.glob(pattern))
        return sum(stat.st_size for _, stat in files(self._root)), 0

    def _trouble(self, message: str) -> None:
        if time.monotonic() >= self._quiet_until:
            log.warning("%s", message)
            self._quiet_until = time.monotonic() + _SILENT


def files(folder: StrPath) -> Iterator[tuple[Path, os.stat_result]]:
    """All files of all models in ``folder``."""
    for pattern in (f"{_HOME}/{_NAME}{BLOCK}", f"{_HOME}/{_NAME}{WINDOW}", f"{_HOME}/states/{_NAME}-*{STATE}"):
        for path in Path(folder).glob(pattern):
            with suppress(OSError):
                yield path, path.stat()


def models(folder: StrPath) -> list[tuple[Path, str, int, int]]:
    """Of each model in ``folder``: where its files are, its name, how many there are and their bytes."""
    found = []
    for about in sorted(Path(folder).glob(f"{_HOME}/model.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            name = str(json.loads(about.read_text(encoding="utf-8"))["model"])
            sizes = [stat.st_size for path, stat in files(folder) if about.parent in path.parents]
            found.append((about.parent, name, len(sizes), sum(sizes)))
    return found


def clear(folder: StrPath) -> int:
    """Delete all files of all models; servers that run do without. Bytes freed. Raises OSError."""
    freed = 0
    for path, stat in files(folder):
        path.unlink(missing_ok=True)
        freed += stat.st_size
    return freed


def _unhindered(path: str, flags: int) -> int:
    """Opens a file; a pipe in its place is not waited for."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _lead(name: str, contents: bytes | memoryview) -> bytes:
    """What stands before a file's contents."""
    checksum = _fast.native.checksum(np.frombuffer(contents, np.uint8)) if len(contents) else 0
    return MAGIC + checksum.to_bytes(8, "little") + hashlib.blake2b(name.encode(), digest_size=16).digest()
