"""What an engine does now and has done so far: a value for whoever watches it from outside its thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.engine.statistics import Stats, pooled

if TYPE_CHECKING:
    from outpace.engine.core import Core
    from outpace.engine.intake import EngineOptions


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Between two steps. ``stats``: pooled over samples that have ended, run or were preempted.
    ``kv_bound``: bytes that KV can come to, by the bound on memory or else by rows and length."""

    running: int
    waiting: int
    rows: int  # the most that run at once
    kv_bytes: int
    kv_bound: int
    block_bytes: int
    prefix_rows: int  # kept for requests that begin alike
    preemptions: int
    stats: Stats


def snapshot(core: Core, options: EngineOptions, memory: int | None) -> Snapshot:
    """In the engine's thread. ``memory``: the bound in bytes."""
    scheduler, kv = core.scheduler, core.model.kv
    preempted = [each for each in scheduler.sequences if each.row < 0 and each.stats.preemptions]
    begun = [*scheduler.running, *preempted]
    for sequence in begun:
        sequence.count_up()
    return Snapshot(
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        rows=options.max_rows,
        kv_bytes=kv.bytes,
        kv_bound=options.max_rows * kv.bytes_for(core.model.info.max_length) if memory is None else memory,
        block_bytes=kv.bytes_for(kv.block),
        prefix_rows=len(scheduler.prefixes),
        preemptions=scheduler.preemptions,
        stats=pooled([core.finished, *(sequence.stats for sequence in begun)]),
    )
