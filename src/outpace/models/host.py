"""What this process may take of its machine: processors, within affinity and a container's quota; memory, of a card or
of the host within a container's limits. Limits stand in control groups, version 2 and version 1.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from outpace.common.units import format_bytes
from outpace.errors import Argument, MemoryLimitError

ROOT = Path("/")


# -- processors -------------------------------------------------------------------------------------------------------


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores among the processors that this process may use, no more than its CPU quota keeps busy."""
    cores, quota = physical_cores(root), cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def allowed() -> list[int]:
    """The numbers of the processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def kind(root: Path = ROOT) -> tuple[str, frozenset[str]]:
    """The processor's name, and the instruction sets that it says it has (none known outside Linux).

    The name has family and model number behind it: virtual machines are given names that say little.
    """
    entries: dict[str, str] = {}
    for line in lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        if not key.strip():
            break  # the next processor is of the same kind
        entries[key.strip()] = value.strip()
    name = entries.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in entries and "model" in entries:
        name += f" (family {entries['cpu family']} model {entries['model']})"
    return name, frozenset(entries.get("flags", entries.get("Features", "")).split())


def physical_cores(root: Path = ROOT) -> int:
    """Physical cores among the processors that this process may use."""
    cores = set()
    for cpu in allowed():
        siblings = lines(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings[0].strip() if siblings else str(cpu))
    return max(1, len(cores))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time that control groups grant; None: as much as there is."""
    found = []
    for version, folder in group_folders("cpu", root):
        if version == 2:
            words = [*"".join(lines(folder / "cpu.max")).split(), "", ""]
            quota, period = words[0], words[1]
        else:
            quota, period = (str(number(folder / f"cpu.cfs_{name}_us") or "") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period) > 0 and int(quota) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


# -- memory -----------------------------------------------------------------------------------------------------------


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


# -- control groups ---------------------------------------------------------------------------------------------------


def group_folders(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """The groups of ``controller`` ("memory", "cpu") above this process, innermost first: (version, folder).

    Not every folder is there, nor has every one a limit.
    """
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            version, mounts = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, list(dict.fromkeys((f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}")))
        else:
            continue
        for mount in mounts:
            # A container may see its group at the mount's top though the path is the host's: go up from what is there.
            folder = root / mount / path.lstrip("/")
            while folder != root / mount:
                yield version, folder
                folder = folder.parent
            yield version, folder


def number(path: Path) -> int | None:
    """What a file holds, if that is a whole number from 0."""
    text = "".join(lines(path)).strip()
    return int(text) if text.isdecimal() else None


def lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # the caller goes by what is there
