"""One step of speculative decoding (Leviathan et al., arXiv 2211.17192): draft, one target forward, verify, commit.

This is the only driver of a step. ``_native.Step`` (native/step/step.h) runs the stages, each for all rows at once, and
stops where a row needs Python; ``complete`` does what is left there, for those rows alone. Until all of a step is
computed nothing committed has changed, so a fault leaves every request as it was.

Between two forwards everything is cold: the weights have swept the caches. What runs here for every row therefore
touches little.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from outpace import _fast
from outpace.control.adaptive import Decision
from outpace.engine import complete
from outpace.engine.clock import Clock
from outpace.engine.complete import Step
from outpace.engine.core import Core
from outpace.engine.request import ChunkRecord, StepRecord
from outpace.engine.sequence import Extension, Sequence
from outpace.engine.statistics import Counted
from outpace.engine.text import TextError
from outpace.errors import MemoryLimitError, ParameterError, RuleError
from outpace.exact.drafts import Verdicts
from outpace.models.base import HiddenStates


class Row(NamedTuple):
    """What a decoding row gained: the tokens of its verdict, the path of nodes, and what stands behind them."""

    tokens: list[int]
    path: list[int]
    sources: list[str]  # of the tokens
    named: list[str]  # sources of all nodes
    levels: int  # of the draft
    size: int  # nodes that were verified, by the policy's decision
    expected: float | None  # the speed that it expected of them


def advance(core: Core) -> None:
    """One step. When it raises, what was committed is whole and the rest is as it was."""
    clock = Clock()
    core.drafting.begin()
    core.expire()
    plan = core.scheduler.plan()
    for sequence, why in plan.failed:
        sequence.commit(sequence.ended("error", why))
        core.leave(sequence)
    if not len(plan):
        return
    step = Step(plan, core.model, core.drafting, core.native, getattr(core.model, "stages", None))
    try:
        compute(step, clock)
        rows, threads, *seconds = step.native.outcome()
        clock.spent(*seconds)
        ends = [ending(step, i, s, rows[i][0]) for i, s in enumerate(plan.decoding)]
        hidden_states = complete.hidden_states(step, ends) if core.drafting.needs.hidden_layers else {}
        apply(core, step, [Row(*row) for row in rows], ends, threads)
    except (MemoryLimitError, MemoryError, _fast.native.MemoryLimit) as error:
        core.scheduler.roll_back()
        core.give_way(str(error) or "the machine is out of memory")
    except BaseException:
        core.scheduler.roll_back()
        core.sweep()
        raise
    else:
        core.starved = 0
        try:
            tell(core, step, ends, hidden_states, clock)
        except BaseException:
            core.sweep()
            raise
    finally:
        step.native.end()


def compute(step: Step, clock: Clock) -> None:
    """Everything that the step will change, before anything is changed."""
    native, plan = step.native, step.plan
    rows: list[tuple[Any, ...]] = []
    for s in plan.decoding:
        most = 0 if s.paused else min(s.size, s.request.limit - s.length - 1)
        row = (s.native or complete.admit(step, s), s.buffer, s.length, most)
        rows.append((*row, *complete.known_rules(s)) if s.ruled else row)
    chunks = [
        (c.sequence.native or complete.admit(step, c.sequence), c.sequence.tokens, c.start, c.count, c.wanted)
        for c in plan.chunks
    ]
    policy = step.drafting.policy
    stage = native.begin(step.stages, None if policy is None else policy.native, rows, chunks)
    while stage < complete.DONE:
        completed, phase = complete.STAGES[stage]
        clock.start(phase)
        completed(step)
        clock.start("other")
        stage = native.run()
    step.lost.update(native.lost)
    if any(s.request.params.wants_logprobs for s in plan.decoding) or any(c.wanted for c in plan.chunks):
        clock.start("verify")
        complete.logprobs(step)
        clock.start("other")


def ending(step: Step, i: int, sequence: Sequence, tokens: list[int]) -> Extension:
    """What row i's verdict makes of its sequence. A fault of its own ends it, here and alone."""
    dead = step.dead.get(i)
    if dead is not None:  # what was accepted before the dead end stays
        tokens = tokens[:-1]
    try:
        extension = sequence.extended(tokens) if tokens else sequence.ended("error", dead)
    except (RuleError, TextError, ParameterError) as error:
        return sequence.ended("error", error)
    if dead is not None and extension.finish_reason is None:  # a stop before the dead end comes first
        extension = extension._replace(finish_reason="error", error=dead)
    return extension


def apply(core: Core, step: Step, rows: list[Row], ends: list[Extension], threads: int) -> None:
    """Sequences take up what they gained; the KV cache has the whole verdict already."""
    for i, (sequence, row, end) in enumerate(zip(step.plan.decoding, rows, ends, strict=True)):
        kept = len(end.tokens)
        length = sequence.length - 1 + kept
        try:
            if i in step.lost:
                raise RuntimeError(step.lost[i])
            if kept <= len(row.path):  # it ends before its verdict does
                core.model.kv.truncate(sequence.row, length)
        except Exception as error:  # its KV is in doubt: computed again, with the same tokens
            core.drafting.faults.append(f"a row's KV could not be settled ({error!r}): it is computed again")
            core.scheduler.preempt(sequence)
            ends[i] = end._replace(tokens=[])
            continue
        sequence.commit(end, row.sources)
        sequence.cached = length
        if i in step.logprobs:
            sequence.logprobs.extend(step.logprobs[i][:kept])
        near = complete.near_ties(step, i, row.path, kept)
        sequence.count(Counted(kept, row.levels, row.named, row.path, row.size, row.expected, threads or None, near))
    for j, chunk in enumerate(step.plan.chunks):
        chunk.sequence.cached = chunk.start + chunk.count
        if chunk.wanted:
            known, found = chunk.sequence.prompt_logprobs, step.logprobs[len(rows) + j]
            known.extend(found if known else [None, *found])  # the first token follows nothing


def tell(core: Core, step: Step, ends: list[Extension], hidden_states: dict[int, HiddenStates], clock: Clock) -> None:
    """Who has ended leaves; then drafters, the policy and the callers hear of the step."""
    plan, drafting = step.plan, core.drafting
    rows = () if core.on_step is None else tuple(s.row for s in plan.decoding)
    for sequence in [s for s in plan.decoding if s.finish_reason]:
        core.clock(sequence, clock)
        core.leave(sequence)
    clock.start("draft")
    final = [(i, len(ends[i].tokens), s) for i, s in enumerate(plan.decoding) if s.row >= 0]
    final += [(j, chunk.count, chunk.sequence) for j, chunk in enumerate(plan.chunks, len(plan.decoding))]
    for name, entries in drafting.observing(final).items():
        sequences = [s for _, _, s in entries]
        if sequences[0].listens:
            drafting.attempt(name, sequences, step.native.observe, [(i, n) for i, n, _ in entries])
        else:
            drafting.observe(
                name, sequences, [complete.event(step, i, n, s, hidden_states.get(i)) for i, n, s in entries]
            )
    if drafting.policy is not None:
        spent = clock.so_far()
        step.native.learn(spent["draft"], spent["target"] + spent["verify"] + spent["other"])
    clock.start("other")
    for sequence in plan.decoding:
        if sequence.row >= 0:
            core.clock(sequence, clock)
            if not sequence.reported:
                core.outbox.append(sequence.delta())
    if core.scheduler.pace.bounded:
        tokens = sum(chunk.count for chunk in plan.chunks)
        core.scheduler.pace.learn(tokens, bool(plan.decoding), clock.so_far()["target"])
    for chunk in plan.chunks:
        chunk.sequence.stats.prefill_seconds += sum(clock.so_far().values())
    if core.on_step is not None:
        core.on_step(record(core, step, ends, rows, clock))


def record(core: Core, step: Step, ends: list[Extension], rows: tuple[int, ...], clock: Clock) -> StepRecord:
    plan = step.plan
    gained = tuple(len(end.tokens) for end in ends)
    kept = complete.drafts(step, kept=True)
    decided = step.native.decisions() or [(n, None) for n in kept.widths.tolist()]
    return StepRecord(
        index=next(core.steps),
        requests=tuple(s.request.id for s in plan.decoding),
        samples=tuple(s.sample for s in plan.decoding),
        rows=rows,
        starts=tuple(s.length - n for s, n in zip(plan.decoding, gained, strict=True)),
        proposed=complete.drafts(step, kept=False),
        kept=kept,
        verdicts=Verdicts(*step.native.verdicts()),
        gained=gained,
        near_ties=tuple(complete.near_ties(step, i, step.native.verdict(i)[1], n) for i, n in enumerate(gained)),
        decisions=tuple(Decision(*fields) for fields in decided),
        chunks=tuple(
            ChunkRecord(c.sequence.request.id, c.sequence.sample, c.sequence.row, c.start, c.count) for c in plan.chunks
        ),
        seconds=dict(clock.so_far()),
        faults=tuple(core.drafting.faults),
    )
