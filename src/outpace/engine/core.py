"""What the engine is behind its conveniences: requests, rows, and what leaves or gives way between steps."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from outpace import _fast
from outpace.engine.drafting import Drafting
from outpace.engine.request import Request, StepRecord
from outpace.engine.results import TARGET, Delta, Result
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import Sequence
from outpace.engine.statistics import Clock, Stats, pooled
from outpace.errors import OutpaceError
from outpace.models.base import Model


class Core:
    """What the engine is behind its conveniences: rows, steps, and deltas that wait in ``outbox``."""

    def __init__(self, model: Model, drafting: Drafting, scheduler: Scheduler) -> None:
        self.model, self.drafting, self.scheduler = model, drafting, scheduler
        self.on_step: Callable[[StepRecord], None] | None = None
        self.on_result: Callable[[Result], None] | None = None
        self.probabilities = False  # whether records have them
        self.requests: dict[int, list[Sequence]] = {}  # samples that have not left, by request
        self._torn = False  # a change was interrupted, and what it left was not mended yet
        self.outbox: deque[Delta] = deque()  # deltas that nobody has been given yet
        self.finished = Stats(requests=0)  # pooled over the requests that have ended
        self._remarked: set[str] = set()  # drafters that a note says bring nothing
        self.steps = itertools.count()
        hidden_layers = list(drafting.needs.hidden_layers)
        self.rows = _fast.native.Rows(model.info.vocab_size, hidden_layers, TARGET)  # of the present step
        self.starved = 0  # forwards in a row that found no memory

    def submit(self, request: Request, sequences: list[Sequence]) -> None:
        """Queue a request's samples."""
        for sequence in sequences:
            self.scheduler.submit(sequence)
        self.requests[request.id] = list(sequences)

    def cancel(self, request: int, error: OutpaceError | None = None) -> None:
        """End a request's samples as they are: cancelled, or in ``error``."""
        ending = list(self.requests.get(request, ()))
        for sequence in ending:
            if sequence.finish_reason is None:
                sequence.commit(sequence.ended("cancelled" if error is None else "error", error))
        for sequence in ending:
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
            if sequence.finish_reason is not None:  # now, or by what it was resumed after
                self.leave(sequence)

    def change(self, call: Callable[..., None], *arguments: object) -> None:
        """``call(*arguments)``, which changes what runs and waits. Where it raises, nothing is lost, wherever
        that is: a signal's handler may, between any two calls."""
        try:
            if self._torn:
                self._mend()
            self._torn = True
            call(*arguments)
        except BaseException:
            self._mend()
            raise
        self._torn = False

    def _mend(self) -> None:
        """After an interruption, of this too: scheduler, cache and drafters are made to fit what requests have
        committed. Whoever has ended leaves."""
        self._torn = True
        self.requests = {
            request: left for request, each in self.requests.items() if (left := [s for s in each if not s.left])
        }
        living = [sequence for each in self.requests.values() for sequence in each]
        self.scheduler.mend(living)
        for sequence in living:
            if sequence.finish_reason is not None:
                self.leave(sequence)
            else:
                self.send(sequence)
        self._torn = False

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

    def send(self, sequence: Sequence) -> None:
        """What was gained since the last delta goes out: once, whatever interrupts this and calls it again."""
        while (again := sequence.unsent is not None) or not sequence.reported:
            delta = sequence.unsent if again else sequence.delta()
            assert delta is not None
            if not again or not any(delta is other for other in self.outbox):
                self.outbox.append(delta)
            sequence.unsent = None

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended: its row is given up, its last delta goes out. Called again, it goes on where it was."""
        sequence.count_up()
        sequence.stats.kv_bytes = self.model.kv.bytes_for(max(sequence.cached, 1))
        for source, remark in pooled([self.finished, sequence.stats]).useless.items():
            if sequence.result is None and source in sequence.stats.drafted_by and source not in self._remarked:
                sequence.notes.append(remark)
                self._remarked.add(source)
        try:
            self.scheduler.release(sequence)
        finally:
            self.send(sequence)
            try:
                if not sequence.left:
                    self.finished, sequence.left = pooled([self.finished, sequence.stats]), True
                    if self.on_result is not None and sequence.result is not None:
                        self.on_result(sequence.result)
            finally:
                request = sequence.request.id
                if left := [s for s in self.requests.get(request, ()) if not s.left]:
                    self.requests[request] = left
                else:
                    self.requests.pop(request, None)

    def check(self) -> None:
        """Assert the invariants of docs/how-it-works.md."""
        for sequence in self.scheduler.running:
            length = self.model.kv.length(sequence.row)
            assert length == sequence.cached, f"row {sequence.row} has KV for {length} positions, not {sequence.cached}"
            assert sequence.cached <= sequence.length - 1, "the pending token's KV is written already"
            assert sequence.finish_reason is None, "a finished sequence still runs"
            assert sequence.length < sequence.limit
        living = sorted(id(sequence) for each in self.requests.values() for sequence in each)
        assert sorted(map(id, self.scheduler.sequences)) == living, "a request is lost or left behind"
        self.scheduler.check()
