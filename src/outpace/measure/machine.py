"""What a report says of the machine that made it."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.models.base import Model

_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd")


def cpu() -> dict[str, Any]:
    """Model, cores this process may use, and the instruction sets that matter here (none known outside Linux)."""
    model, flags = platform.processor() or platform.machine(), ""
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = value
            break
    present = set(flags.split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "cores": cores, "features": [name for name in _FEATURES if name in present]}


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read().splitlines()
    except OSError:
        return []


def memory() -> dict[str, int | None]:
    """Bytes of memory, all and available; None where the system does not say."""
    from outpace.models.memory import available_memory

    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return {"total": None, "available": None}
    return {"total": total, "available": available_memory()}


def threads_of(model: Model) -> int | None:
    """The CPU threads that a model computes with; None where it does not say."""
    return getattr(model, "threads", None)


def team_of(model: Model) -> dict[str, Any] | None:
    """Threads in use now, and the seconds that a run on sleeping and on waking threads takes; None elsewhere."""
    size = getattr(model, "team", None)
    return None if size is None else {"size": size, "hand_over_seconds": getattr(model, "hand_over", None)}


def path_of(model: Model) -> str | None:
    """The native runtime's instruction-set path: tokens are promised identical within one. None elsewhere."""
    return getattr(model, "isa", None)
