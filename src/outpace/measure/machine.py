"""What a report says of the machine that made it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.models import host

if TYPE_CHECKING:
    from outpace.models.base import Model

_FEATURES = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd")


def cpu() -> dict[str, Any]:
    """Model, cores this process may use, and the instruction sets that matter here (none known outside Linux)."""
    name, flags = host.kind()
    features = [feature for feature in _FEATURES if feature in flags]
    return {"model": name, "cores": len(host.allowed()), "features": features}


def amx() -> dict[str, Any]:
    """Intel's tiles: present; off: why they are not used, "" where they are; from: file type -> tokens from which its
    products use them, 0: never."""
    from outpace import _fast

    return _fast.native.amx()


def joules(domains: Path = Path("/sys/class/powercap")) -> float | None:
    """What the processors have used since some moment, by RAPL, whose counters begin anew every few minutes to hours;
    None where it cannot be read, as in most virtual machines and for users other than root."""
    try:
        found = [
            int((each / "energy_uj").read_text())
            for each in sorted(domains.glob("intel-rapl:*"))
            if ":" not in each.name[11:]
        ]
    except (OSError, ValueError):
        return None
    return sum(found) / 1e6 if found else None


def memory() -> dict[str, int | None]:
    """Bytes of memory, all and available; None where the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return {"total": None, "available": None}
    return {"total": total, "available": host.available_memory()}


def team_of(model: Model) -> dict[str, Any] | None:
    """Threads in use now, how often they became fewer, whether they claim their work, and the seconds that a run on
    them takes; None elsewhere."""
    runtime = model.runtime
    if runtime is None:
        return None
    dropped, kept = runtime.drops
    return {
        "size": runtime.team,
        "dropped": dropped,
        "kept": kept,
        "claims": runtime.claims,
        "hand_over_seconds": {"asleep": runtime.wake_seconds, "awake": runtime.hand_over_seconds},
    }
