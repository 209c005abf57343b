"""How late the event loop comes to what waits for it, and why: its own callbacks, other threads, or the machine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_PERIOD = 0.1  # seconds from one look to the next


@dataclass(frozen=True, slots=True)
class Delay:
    """Seconds by which the loop was late. Of those, ``loop``: its thread ran; ``machine``: it was ready to run, but had
    no core (known on Linux alone); ``threads``: it waited, for the interpreter or for the system."""

    total: float
    loop: float
    machine: float
    threads: float


async def watched(take: Callable[[Delay], object]) -> None:
    """Look ten times a second, until cancelled, and give ``take`` how late that was."""
    try:
        statistics = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        await _watched(take, lambda: 0.0)
        return
    try:
        await _watched(take, lambda: int(os.pread(statistics, 128, 0).split()[1]) / 1e9)
    finally:
        os.close(statistics)


async def _watched(take: Callable[[Delay], object], unscheduled: Callable[[], float]) -> None:
    """``unscheduled``: seconds so far in which this thread had no core."""
    while True:
        used, had_none, due = time.thread_time(), unscheduled(), time.perf_counter() + _PERIOD
        await asyncio.sleep(_PERIOD)
        late = max(time.perf_counter() - due, 0.0)
        loop = min(time.thread_time() - used, late)
        machine = min(unscheduled() - had_none, late - loop)
        take(Delay(late, loop, machine, late - loop - machine))
