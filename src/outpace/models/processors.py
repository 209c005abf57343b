"""How many processors are there to compute with: physical cores, within affinity and a container's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path

from outpace.models.cgroups import ROOT, group_folders, lines, number


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores among the processors that this process may use, no more than its CPU quota keeps busy."""
    cores, quota = physical_cores(root), cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def physical_cores(root: Path = ROOT) -> int:
    """Physical cores among the processors that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1):
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
