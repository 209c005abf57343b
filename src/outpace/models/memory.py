"""How much memory there is to take: of a card, or of the host and the control groups that this process is in."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.common.units import format_bytes
from outpace.errors import Argument, MemoryLimitError
from outpace.models.cgroups import ROOT, group_folders, lines, number


def spare_memory(device: str, weights: int, root: Path = ROOT) -> int | None:
    """Half of what is free on ``device`` ("cpu", "cuda", "cuda:1") once ``weights`` bytes more are loaded there.

    None where the system does not say. Raises MemoryLimitError when the weights do not fit.
    """
    free = free_memory(device, root)
    if free is None:
        return None
    if free < weights:
        where = "" if device == "cpu" else f" on {device}"
        raise MemoryLimitError(
            f"the weights need {format_bytes(weights)}, but {format_bytes(free)} are free{where}: "
            "use a smaller model or ",
            Argument("dtype", "bfloat16"),
        )
    return (free - weights) // 2


def free_memory(device: str, root: Path = ROOT) -> int | None:
    """Bytes that can be had on ``device`` now; None where the system does not say."""
    if device.partition(":")[0] == "cuda":
        return _card_memory(device)
    return None if device != "cpu" else available_memory(root)


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes of host memory that this process can still have: the kernel's estimate, within control groups' limits."""
    found = [free for free in (_system_memory(root), *_group_memory(root)) if free is not None]
    return max(0, min(found)) if found else None


def _card_memory(device: str) -> int:
    import torch

    free: int = torch.cuda.mem_get_info(torch.device(device))[0]
    return free


def _system_memory(root: Path) -> int | None:
    """What can be had without swapping: MemAvailable, or the free pages of a system that has no /proc."""
    for line in lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if root != ROOT:
        return None
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _group_memory(root: Path) -> list[int]:
    """What each memory control group above this process leaves, version 2 and version 1."""
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    return [left for version, folder in group_folders("memory", root) for left in _left(folder, *names[version])]


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    """What one group leaves: its limit less what is in use, except pages of files that nobody uses now."""
    most, used = number(folder / limit), number(folder / usage)
    if most is None or used is None:  # no group here, or no limit ("max")
        return []
    cached = 0
    for line in lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == reclaimable and value.strip().isdecimal():
            cached = int(value)
    return [most - max(0, used - cached)]
