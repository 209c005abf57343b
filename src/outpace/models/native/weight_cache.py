"""The folder in which packed weights are kept: where a model's are, how much there may be, and what goes first.

``OUTPACE_WEIGHT_CACHE`` is a folder, or 0 for none; without it the cache folder's ``weights``.
``OUTPACE_WEIGHT_CACHE_LIMIT`` bounds all files together (LIMIT). A model without kept weights is packed as ever:
nothing that goes wrong here is an error, but it is logged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace import _fast
from outpace.common.files import SPARE, StrPath, cache_dir, crowded, expanded, sweep
from outpace.common.units import format_bytes, parse_bytes
from outpace.common.version import __version__
from outpace.errors import ParameterError
from outpace.models.host import available_memory
from outpace.models.native import packed

log = logging.getLogger(__name__)
progress = log.getChild("progress")  # what a command line shows without being asked: it takes room on the disk

SMALLEST = 32 << 20  # bytes of a model's files; packing less takes no longer than a person notices
LIMIT = 32 << 30  # bytes of all files
HUGE = 0.9  # share in huge pages from which weights stay where they are mapped
_SUFFIX = ".packed"
_writers: dict[Path, threading.Thread] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model's packed weights are kept. ``key``: what they were made of, and by what."""

    path: Path
    name: str
    key: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache. ``key`` is None where it cannot be read."""

    path: Path
    name: str
    bytes: int
    used: float  # when, as time.time() counts
    key: dict[str, Any] | None


def folder() -> Path | None:
    """Where packed weights are kept; None: nowhere."""
    named = os.environ.get("OUTPACE_WEIGHT_CACHE", "")
    if named.lower() in ("0", "off", "no", "false") or os.name == "nt":  # a mapped file could not be replaced there
        return None
    return expanded(named) if named else cache_dir() / "weights"


def limit() -> int:
    """Bytes that all files may take. Raises ParameterError for an amount that is none."""
    try:
        return parse_bytes(os.environ.get("OUTPACE_WEIGHT_CACHE_LIMIT") or LIMIT)
    except ParameterError as error:
        raise ParameterError("OUTPACE_WEIGHT_CACHE_LIMIT: ", error) from error


def place(name: str, files: Sequence[StrPath], target: str) -> Place | None:
    """Where the weights that ``files`` make are kept; None where the cache is off or would not pay."""
    where = folder()
    if where is None:
        return None
    try:
        found = [(path.resolve(), path.stat()) for path in map(Path, files)]
    except OSError as error:
        log.info("%s: the packed weights are not kept, since the model's file has gone: %s", name, error)
        return None
    if sum(stat.st_size for _, stat in found) < SMALLEST:
        return None
    key = {
        "outpace": __version__,
        "interface": _fast.INTERFACE,
        "files": [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in found],
        "target": target,
    }
    return Place(where / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}{_SUFFIX}", name, key)


def find(where: Place, threads: int) -> packed.PackedFile | None:
    """The kept weights, checked; None where there are none, or none that can be used, which is logged.

    Small pages would cost 5 to 8 % of every narrow forward. So where the system holds the file in such, and there is
    memory, weights are copied into huge pages: that takes about as long as packing, and decoding is worth more.
    """
    settle(where.path)
    try:
        kept = packed.PackedFile(where.path, where.key, threads)
    except FileNotFoundError:
        return None
    except packed.UnusableError as error:
        refuse(where, error)
        return None
    with suppress(OSError):  # a folder that cannot be written keeps no order
        os.utime(where.path)
    copied = kept.huge < HUGE and (available_memory() or 0) > 2 * kept.bytes
    if copied:
        kept.copy(threads)
    log.info("%s: packed weights %s %s", where.name, "copied from" if copied else "mapped from", where.path)
    return kept


def refuse(where: Place, why: packed.UnusableError) -> None:
    log.warning("%s is not usable (%s), so the weights are packed anew", where.path, why)


def keep(where: Place, packer: packed.Packer) -> None:
    """Write what was packed, in place of what is older, beside whatever the model does meanwhile. Where that cannot be,
    a line says so. The process does not end before it is written."""
    size = packed.size_of(packer.made)
    progress.info(
        "%s: %s of packed weights go to %s meanwhile, for the next start (OUTPACE_WEIGHT_CACHE=0: none are kept)",
        where.name, format_bytes(size), where.path.parent,
    )  # fmt: skip
    writer = threading.Thread(target=_write, args=(where, packer, size), name="outpace-weights")
    try:
        writer.start()
    except RuntimeError as error:  # no more threads
        log.warning("%s: the packed weights are not kept: %s", where.name, error)
        return
    _writers[where.path] = writer  # once it runs: another thread that loads may join it from here on


def settle(path: StrPath | None = None) -> None:
    """Wait until this process has written the file ``path``, or all."""
    for its, writer in list(_writers.items()):
        if path is None or its == Path(path):
            writer.join()
            if _writers.get(its) is writer:
                _writers.pop(its, None)  # another thread may have been first


def _write(where: Place, packer: packed.Packer, size: int) -> None:
    begun = time.perf_counter()
    try:
        if sys.platform == "linux":  # where threads have priorities of their own: decoding goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        where.path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(where, size)
        packed.write(where.path, where.name, where.key, packer.made)
    except (OSError, ParameterError) as error:
        log.warning("%s: the packed weights are not kept: %s", where.name, error)
        return
    log.info(
        "%s: packed weights kept in %s (%s, %.1f s)",
        where.name, where.path, format_bytes(size), time.perf_counter() - begun,
    )  # fmt: skip


def entries(where: StrPath) -> list[Entry]:
    """The files of a cache, the last used first."""
    found = []
    for path in Path(where).glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):  # another process may be clearing up
            stat = path.stat()
            try:
                with path.open("rb") as file:
                    header = packed.read_header(file)
                found.append(Entry(path, header["name"], stat.st_size, stat.st_mtime, header["key"]))
            except (packed.UnusableError, PermissionError):
                found.append(Entry(path, path.name, stat.st_size, stat.st_mtime, None))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def clear(where: StrPath) -> int:
    """Delete all files, also those that others use: they keep what they have mapped. Bytes freed. Raises OSError."""
    where, freed = Path(where), 0
    for path in [*where.glob(f"*{_SUFFIX}"), *where.glob(f".*{_SUFFIX}.*.tmp")]:
        with suppress(FileNotFoundError):
            freed += path.stat().st_size
            path.unlink()
    return freed


def _make_room(where: Place, size: int) -> None:
    """Delete what this one supersedes, then the least recently used. Raises OSError where there is no room even so."""
    most, home = limit(), where.path.parent
    if size > most:
        raise OSError(f"they take {format_bytes(size)}, and the cache may take {format_bytes(most)}")
    sweep(home.glob(f".*{_SUFFIX}.*.tmp"))
    sources = [file[0] for file in where.key["files"]]
    kept = []
    for entry in entries(home):
        old = entry.key is None or (
            [file[0] for file in entry.key["files"]] == sources and entry.key["files"] != where.key["files"]
        )
        if old or entry.path == where.path:
            entry.path.unlink(missing_ok=True)
        else:
            kept.append(entry)
    total = size + sum(entry.bytes for entry in kept)
    while kept and (total > most or crowded(home, size)):
        last = kept.pop()
        last.path.unlink(missing_ok=True)
        total -= last.bytes
    if crowded(home, size):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {format_bytes(SPARE)} of which stay free", str(home))
