"""The processors: what they are, and how many are there to compute with, within affinity and a container's quota."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from outpace.models.cgroups import ROOT, group_folders, lines, number


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
