"""What the C library and the system do with memory. Where they are other ones, these do nothing and return False."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

HUGE = 2 << 20  # bytes of a huge page
_COLLAPSE = 25  # madvise's, from mman.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # mallopt's, from malloc.h


def keep_freed() -> bool:
    """Have it keep what is freed, for who takes and gives back gigabytes again and again: fresh pages cost time."""
    return _set({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20})


def few_arenas(most: int = 2) -> bool:
    """Have threads that begin from now on share so many arenas: each keeps free pages of its own, up to 8 a core."""
    return _set({_ARENA_MAX: most})


def trim() -> bool:
    """Give free pages back to the system, from any thread: milliseconds, in which others may wait for memory. Whether
    there were any."""
    give_back = _glibc("malloc_trim")
    return give_back is not None and bool(give_back(0))


def huge(address: int, size: int) -> bool:
    """Move memory that is there into huge pages, with what shares its first and its last one. Whether all of it is."""
    advise = _glibc("madvise")
    begin, end = address // HUGE * HUGE, -(-(address + size) // HUGE) * HUGE
    return advise is not None and not advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)


def _set(values: dict[int, int]) -> bool:
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    taken = [mallopt(name, value) for name, value in values.items()]
    return all(taken)


def _glibc(name: str) -> Callable[..., Any] | None:
    if sys.platform != "linux":
        return None
    function: Callable[..., Any] | None = getattr(ctypes.CDLL(None), name, None)  # musl has none of these
    return function
