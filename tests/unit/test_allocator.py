"""What is asked of glibc's allocator has its effect; where there is another, nothing is done and that is said."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.common import allocator

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")

# As many arenas as threads have asked for by then; each of those threads lives on until all have memory.
ARENAS = """
import ctypes, sys, threading
from outpace.common import allocator
most = int(sys.argv[1])
assert not most or allocator.few_arenas(most)
there = threading.Barrier(6)
def take():
    kept = bytearray(5000)
    there.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
its = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
assert libc.malloc_info(0, its) == 0
libc.fclose(its)
"""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def huge_kilobytes(address: int) -> int:
    """Of the mapping at ``address``, as the kernel says; 0 elsewhere than on Linux."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines() if sys.platform == "linux" else ():
        first, *rest = line.split()
        if first.endswith(":"):
            if inside and first == "AnonHugePages:":
                return int(rest[0])
        else:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
    return 0


@pytest.mark.skipif(not GLIBC, reason="glibc's own")
def test_threads_share_few_arenas(tmp_path: Path) -> None:
    def arenas(most: int) -> int:
        where = tmp_path / "info.xml"
        subprocess.run([sys.executable, "-c", ARENAS, str(most), str(where)], check=True)
        return where.read_text().count("<heap nr=")

    assert arenas(2) == 2
    assert arenas(0) > 2


@pytest.mark.skipif(not GLIBC, reason="glibc's own")
def test_free_pages_are_given_back() -> None:
    taken = [b"x" * 20_000 for _ in range(2500)]
    last = taken.pop()  # above them, so that the heap cannot shrink by itself
    taken.clear()
    before = resident()
    assert allocator.trim()
    assert resident() < before - 40_000_000
    assert len(last) == 20_000


def test_what_moves_into_huge_pages_stays_what_it_is() -> None:
    size = 3 * allocator.HUGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(range(256)) * (size // 256))
        address = ctypes.addressof(first := ctypes.c_char.from_buffer(memory))
        moved = allocator.huge(address + 5000, allocator.HUGE)
        assert not moved or huge_kilobytes(address) >= 2 * allocator.HUGE >> 10
        assert memory[:] == bytes(range(256)) * (size // 256)
        del first


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_elsewhere_nothing_is_done(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """musl is Linux without these functions; elsewhere the library is not even looked for."""

    def musl(name: None) -> object:
        assert platform == "linux"
        return object()

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", musl)
    assert [allocator.trim(), allocator.few_arenas(), allocator.keep_freed(), allocator.huge(0, 1)] == [False] * 4


@pytest.mark.skipif(not GLIBC, reason="glibc's own")
def test_all_that_training_asks_for_is_taken() -> None:
    code = "from outpace.common import allocator; raise SystemExit(not allocator.keep_freed())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
