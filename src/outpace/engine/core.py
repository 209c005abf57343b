"""A step, applied: computed first, applied last, so that what fails on the way leaves every request where it was."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

from outpace.drafters.base import Event
from outpace.engine.clock import Clock
from outpace.engine.drafting import Drafting
from outpace.engine.native import NativeComputed, NativeSteps
from outpace.engine.request import ChunkRecord, Request, StepRecord
from outpace.engine.results import Delta, Result
from outpace.engine.scheduler import Plan, Scheduler
from outpace.engine.sequence import Sequence
from outpace.engine.statistics import Counted, Stats, pooled
from outpace.engine.step import Computed, compute, cut, settle
from outpace.errors import MemoryLimitError
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
        self._steps = itertools.count()
        self._native = NativeSteps.of(model, drafting)  # for steps that need no Python
        self._starved = 0  # forwards in a row that found no memory

    def submit(self, request: Request, sequences: list[Sequence]) -> None:
        """Queue a request's samples."""
        self.requests[request.id] = request
        for sequence in sequences:
            self.scheduler.submit(sequence)

    def cancel(self, request: int) -> None:
        """End a request's samples as they are."""
        for sequence in [s for s in self.scheduler.sequences if s.request.id == request]:
            if sequence.finish_reason is None:
                sequence.commit(sequence.ended("cancelled"))
            self._leave(sequence)

    def advance(self) -> None:
        """One step. When it raises, what was committed is whole and the rest is as it was."""
        clock = Clock()
        self.drafting.begin()
        self._expire()
        plan = self.scheduler.plan()
        for sequence, why in plan.failed:
            sequence.commit(sequence.ended("error", why))
            self._leave(sequence)
        if not len(plan):
            return
        try:
            computed = self._compute(plan, clock)
            gained = self._apply(plan, computed)
        except (MemoryLimitError, MemoryError) as error:
            self.scheduler.roll_back()
            self._give_way(str(error) or "the machine is out of memory")
        except BaseException:
            self.scheduler.roll_back()
            self._sweep()
            raise
        else:
            self._starved = 0
            try:
                self._tell(plan, computed, gained, clock)
            except BaseException:
                self._sweep()
                raise

    def _compute(self, plan: Plan, clock: Clock) -> Computed | NativeComputed:
        if self._native is not None and (computed := self._native.compute(plan, clock)) is not None:
            return computed
        return compute(plan, self.model, self.drafting, clock)

    def _apply(self, plan: Plan, computed: Computed | NativeComputed) -> list[int]:
        """Make the KV cache and the sequences what was computed; tokens gained by each decoding row."""
        gained, kv = [], self.model.kv
        for i, (sequence, gain) in enumerate(zip(plan.decoding, computed.gains, strict=True)):
            try:
                if gain.settled:
                    length = cut(kv, sequence, gain)
                else:
                    length = settle(kv, sequence, computed.proposal.kept, i, gain)
            except Exception as error:  # its KV is in doubt: computed again, with the same tokens
                self.drafting.faults.append(f"a row's KV could not be settled ({error!r}): it is computed again")
                self.scheduler.preempt(sequence)
                gained.append(0)
                continue
            sequence.commit(gain.extension, gain.sources)
            sequence.cached = length
            if gain.logprobs:
                sequence.logprobs.extend(gain.logprobs)
            kept = len(gain.extension.tokens)
            sequence.count(
                Counted(kept, gain.levels, gain.named, gain.path, gain.size, gain.expected, computed.threads)
            )
            gained.append(kept)
        for chunk, logprobs in zip(plan.chunks, computed.prompt_logprobs, strict=True):
            chunk.sequence.cached = chunk.start + chunk.count
            if chunk.wanted:
                its = chunk.sequence.prompt_logprobs
                its.extend(logprobs if its else [None, *logprobs])  # the first token follows nothing
        return gained

    def _tell(self, plan: Plan, computed: Computed | NativeComputed, gained: list[int], clock: Clock) -> None:
        """Who has ended leaves; then drafters, the policy and the callers hear of the step."""
        rows = () if self.on_step is None else tuple(s.row for s in plan.decoding)
        for sequence in [s for s in plan.decoding if s.finish_reason]:
            self._clock(sequence, clock)
            self._leave(sequence)
        clock.start("draft")
        if isinstance(computed, NativeComputed):
            if self.drafting.needs.taps:
                going = [(i, gained[i], s) for i, s in enumerate(plan.decoding) if s.row >= 0]
                going += [(j, chunk.count, chunk.sequence) for j, chunk in enumerate(plan.chunks, len(plan.decoding))]
                self.drafting.hear(going, computed.observe)
        elif events := self._events(plan, computed, gained):
            self.drafting.observe(events)
        self.drafting.learn(plan.decoding, computed.teach, clock.so_far())
        clock.start("other")
        for sequence in plan.decoding:
            if sequence.row >= 0:
                self._clock(sequence, clock)
                self.outbox.append(sequence.delta())
        if self.scheduler.pace.bounded:
            tokens = sum(chunk.count for chunk in plan.chunks)
            self.scheduler.pace.learn(tokens, bool(plan.decoding), clock.so_far()["target"])
        for chunk in plan.chunks:
            chunk.sequence.stats.prefill_seconds += sum(clock.so_far().values())
        if self.on_step is not None:
            self.on_step(self._record(plan, computed, gained, rows, clock))

    def _clock(self, sequence: Sequence, clock: Clock) -> None:
        seconds = sequence.stats.seconds
        for phase, spent in clock.so_far().items():
            seconds[phase] += spent

    def _events(self, plan: Plan, computed: Computed, gained: list[int]) -> list[tuple[Sequence, Event]]:
        """What became final in rows that go on, and whose drafter listens."""
        events, taps = [], computed.taps
        for i, sequence in enumerate(plan.decoding):
            if sequence.row >= 0 and self.drafting.listens_to(sequence):
                start, verdict = sequence.length - gained[i], computed.verdicts.row(i)
                event = Event(
                    sequence.row, start, sequence.tokens[start:], verdict, taps.get(i), computed.choices.get(i)
                )
                events.append((sequence, event))
        for j, chunk in enumerate(plan.chunks, len(plan.decoding)):
            if self.drafting.listens_to(chunk.sequence):
                after = chunk.sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.count]
                events.append((chunk.sequence, Event(chunk.sequence.row, chunk.start + 1, after, None, taps.get(j))))
        return events

    def _record(
        self,
        plan: Plan,
        computed: Computed | NativeComputed,
        gained: list[int],
        rows: tuple[int, ...],
        clock: Clock,
    ) -> StepRecord:
        proposal = computed.proposal
        return StepRecord(
            index=next(self._steps),
            requests=tuple(s.request.id for s in plan.decoding),
            samples=tuple(s.sample for s in plan.decoding),
            rows=rows,
            starts=tuple(s.length - n for s, n in zip(plan.decoding, gained, strict=True)),
            proposed=proposal.proposed,
            kept=proposal.kept,
            verdicts=computed.verdicts,
            gained=tuple(gained),
            decisions=tuple(proposal.decisions),
            chunks=tuple(
                ChunkRecord(c.sequence.request.id, c.sequence.sample, c.sequence.row, c.start, c.count)
                for c in plan.chunks
            ),
            seconds=dict(clock.so_far()),
            faults=tuple(self.drafting.faults),
        )

    def _expire(self) -> None:
        """Requests past their deadline end as they are."""
        now = time.perf_counter()
        for sequence in self.scheduler.sequences:
            deadline = sequence.request.deadline
            if deadline is not None and sequence.finish_reason is None and now > sequence.request.added + deadline:
                sequence.commit(sequence.ended("deadline", f"the deadline of {deadline:g} s passed"))
            if sequence.finish_reason is not None:  # now, or in a step that was interrupted
                self._leave(sequence)

    def _sweep(self) -> None:
        """Whoever has ended leaves, in whatever step that was interrupted."""
        for sequence in self.scheduler.sequences:
            if sequence.finish_reason is not None:
                self._leave(sequence)

    def _give_way(self, why: str) -> None:
        """A forward found no memory: what is kept goes, then the youngest row waits; one that is alone ends, if it
        happens again."""
        self._starved += 1
        if self.scheduler.make_room():
            return
        if len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.youngest)
        elif self.scheduler.running and self._starved > 1:
            sequence = self.scheduler.running[0]
            sequence.commit(sequence.ended("error", why))
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
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
