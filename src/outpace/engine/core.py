"""What the engine is behind its conveniences: requests, rows, and what leaves or gives way between steps."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from outpace import _fast
from outpace.engine.clock import Clock
from outpace.engine.drafting import Drafting
from outpace.engine.request import Request, StepRecord
from outpace.engine.results import TARGET, Delta, Result
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import Sequence
from outpace.engine.statistics import Stats, pooled
from outpace.errors import OutpaceError
from outpace.models.base import Model


class Core:
    """What the engine is behind its conveniences: rows, steps, and deltas that wait in ``outbox``."""

    def __init__(self, model: Model, drafting: Drafting, scheduler: Scheduler) -> None:
        self.model, self.drafting, self.scheduler = model, drafting, scheduler
        self.on_step: Callable[[StepRecord], None] | None = None
        self.on_result: Callable[[Result], None] | None = None
        self.requests: dict[int, Request] = {}  # those that run or wait
        self.outbox: deque[Delta] = deque()  # deltas that nobody has been given yet
        self.finished = Stats(requests=0)  # pooled over the requests that have ended
        self.steps = itertools.count()
        hidden_layers = list(drafting.needs.hidden_layers)
        self.rows = _fast.native.Rows(model.info.vocab_size, hidden_layers, TARGET)  # of the present step
        self.starved = 0  # forwards in a row that found no memory

    def submit(self, request: Request, sequences: list[Sequence]) -> None:
        """Queue a request's samples."""
        self.requests[request.id] = request
        for sequence in sequences:
            self.scheduler.submit(sequence)

    def cancel(self, request: int, error: OutpaceError | None = None) -> None:
        """End a request's samples as they are: cancelled, or in ``error``."""
        for sequence in [s for s in self.scheduler.sequences if s.request.id == request]:
            if sequence.finish_reason is None:
                sequence.commit(sequence.ended("cancelled" if error is None else "error", error))
            self.leave(sequence)

    def clock(self, sequence: Sequence, clock: Clock) -> None:
        seconds = sequence.stats.seconds
        for phase, spent in clock.so_far().items():
            seconds[phase] += spent

    def expire(self) -> None:
        """Requests past their deadline end as they are."""
        now = time.perf_counter()
        for sequence in self.scheduler.sequences:
            deadline = sequence.request.deadline
            if deadline is not None and sequence.finish_reason is None and now > sequence.request.added + deadline:
                sequence.commit(sequence.ended("deadline", f"the deadline of {deadline:g} s passed"))
            if sequence.finish_reason is not None:  # now, or in a step that was interrupted
                self.leave(sequence)

    def sweep(self) -> None:
        """Whoever has ended leaves, in whatever step that was interrupted."""
        for sequence in self.scheduler.sequences:
            if sequence.finish_reason is not None:
                self.leave(sequence)

    def give_way(self, why: str) -> None:
        """A forward found no memory: what is kept goes, then the youngest row waits; one that is alone ends, if it
        happens again."""
        self.starved += 1
        if self.scheduler.make_room():
            return
        if len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.youngest)
        elif self.scheduler.running and self.starved > 1:
            sequence = self.scheduler.running[0]
            sequence.commit(sequence.ended("error", why))
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended: its row is given up, its last delta goes out."""
        sequence.count_up()
        sequence.stats.kv_bytes = self.model.kv.bytes_for(max(sequence.cached, 1))
        try:
            self.scheduler.release(sequence)
        finally:
            delta = sequence.delta()
            self.outbox.append(delta)
            self.finished = pooled([self.finished, sequence.stats])
            if self.on_result is not None and delta.result is not None:
                self.on_result(delta.result)
            if not any(s.request is sequence.request for s in self.scheduler.sequences):
                self.requests.pop(sequence.request.id, None)

    def check(self) -> None:
        """Assert the invariants of docs/how-it-works.md."""
        for sequence in self.scheduler.running:
            length = self.model.kv.length(sequence.row)
            assert length == sequence.cached, f"row {sequence.row} has KV for {length} positions, not {sequence.cached}"
            assert sequence.cached <= sequence.length - 1, "the pending token's KV is written already"
            assert sequence.finish_reason is None, "a finished sequence still runs"
            assert sequence.length < sequence.limit
        assert {s.request.id for s in self.scheduler.sequences} == set(self.requests), (
            "a request is lost or left behind"
        )
        self.scheduler.check()
