"""One step of speculative decoding (Leviathan et al., arXiv 2211.17192): draft, one target forward, verify, commit.

``advance`` is the only driver of a step. ``core.rows``, an ``_native.Rows`` (native/step/rows.h), holds the drafts and
verdicts of all rows; each call into it does one part of a step in bulk, and what needs Python is done between two calls
for the rows that need it: drafters and rules that are written in Python, ``rejection``. Until all of a
step is computed nothing committed has changed, so a fault leaves every request as it was.

Between two forwards everything is cold: the weights have swept the caches. What runs here for every row therefore
touches little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from outpace import _fast
from outpace.common.arrays import F64, I32
from outpace.control.adaptive import Decision
from outpace.drafters.base import Drafter, Event
from outpace.engine.core import Core
from outpace.engine.explained import Explained, explained, numbered_as_proposed
from outpace.engine.request import ChunkRecord, RowRecord, StepRecord
from outpace.engine.scheduler import Plan
from outpace.engine.sequence import Extension, Sequence
from outpace.engine.statistics import Clock, Counted
from outpace.engine.walk import Walk
from outpace.errors import DrafterError, MemoryLimitError, ParameterError, RuleError
from outpace.exact.drafts import Draft, Drafts, Verdict
from outpace.exact.rules import forced, pruned
from outpace.exact.sampling import TokenLogprob
from outpace.models.base import HiddenStates, Output
from outpace.models.native.output import Edit, describe, known_edits
from outpace.text.answer import TextError

GRAMMAR = "grammar"  # the source of tokens that a rule says must follow


@dataclass(slots=True)
class Step:
    """A step of B decoding rows and C chunks of prompts, and what Python computed of it, by row of the batch.

    ``proposals``: what a drafter that reads choices proposed; ``q`` [k, V]: what each node was drawn from; ``dead``:
    why its rules left no token after what was accepted; ``choices`` int32 [k + 1]: the target's choice after every
    node; ``logprobs``: of all tokens of its verdict, or of the prompt's that follow those of a chunk; ``explained``:
    what decided its tokens, where somebody asks; ``lost``: why its KV is in doubt.
    """

    core: Core
    plan: Plan
    output: Output | None = None
    proposals: dict[int, Draft] = field(default_factory=dict)
    q: dict[int, F64] = field(default_factory=dict)
    dead: dict[int, Exception] = field(default_factory=dict)
    choices: dict[int, I32] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    explained: dict[int, Explained] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What a decoding row gained: the tokens of its verdict, the path of nodes, and what stands behind them."""

    tokens: list[int]
    path: list[int]
    sources: list[str]  # of the tokens
    named: list[str]  # sources of all nodes
    depth: int  # of the draft
    size: int  # nodes that were verified, by the policy's decision
    expected: float | None  # the speed that it expected of them


def advance(core: Core) -> None:
    """One step, within ``Core.change``: when it raises, what was committed is whole and the rest is as it was."""
    clock = Clock()
    core.drafting.begin()
    core.expire()
    plan = core.scheduler.plan()
    for sequence, why in plan.failed:
        sequence.commit(sequence.ended("error", why))
        core.leave(sequence)
    if not len(plan):
        return
    step = Step(core, plan)
    try:
        begin(step)
        clock.start("draft")
        propose(step)
        apply_rules(step)
        core.rows.trim()
        clock.start("target")
        step.output = core.model.run(core.rows)
        clock.start("verify")
        verify(step)
        step.lost.update(core.model.kv.settle(core.rows))
        score(step)
        clock.start("other")
        if core.probabilities and core.on_step is not None:
            explain(step)
        outcomes = [Outcome(*row) for row in core.rows.outcome()]
        ends = [ending(step, i, s, outcomes[i].tokens) for i, s in enumerate(plan.decoding)]
        states = hidden_states(step, ends) if core.drafting.needs.hidden_layers else {}
        commit(step, outcomes, ends)
    except (MemoryLimitError, MemoryError, _fast.native.MemoryLimit) as error:
        core.scheduler.roll_back()
        core.give_way(str(error) or "the machine is out of memory")
    else:
        core.starved = 0
        tell(step, ends, states, clock)
    finally:
        core.rows.end()


# -- drafts ----------------------------------------------------------------------------------------------------------


def begin(step: Step) -> None:
    """All rows and chunks, with how many nodes the policy lets each row draft."""
    core, rows = step.core, []
    for s in step.plan.decoding:
        most = 0 if s.paused else min(s.size, s.room - 1)
        row = (s.native or native_row(core, s), s.buffer, s.length, most)
        rows.append((*row, *known_rules(s)) if s.ruled else row)
    chunks = [
        (c.sequence.native or native_row(core, c.sequence), c.sequence.tokens, c.start, c.count, c.wanted)
        for c in step.plan.chunks
    ]
    policy = core.drafting.policy
    core.rows.begin(None if policy is None else policy.native, rows, chunks)


def native_row(core: Core, sequence: Sequence) -> _fast.native.Row:
    """What stays as it is of a sequence while it has its row."""
    request, drafting = sequence.request, core.drafting
    view, drafter, needs = drafting.view(sequence), drafting.drafter_of(sequence), drafting.needs_of(sequence)
    native = None if drafter is None else drafter.native
    beside = core.model.native is not None  # a native model gives native drafters what they learn from
    learning = [] if drafter is None else drafter.in_python if beside else [drafter]
    sequence.listens = native is not None and bool(native.hidden_layers) and beside
    sequence.observes = any(each.observes for each in learning)
    sequence.reads = any(each.needs.hidden_layers for each in learning)
    sequence.ranks = max((each.needs.ranks for each in learning), default=0)
    sequence.native = core.rows.row(
        row=sequence.row, request=request.id, prompt=sequence.prompt_length, adaptive=view.adaptive,
        drafter=view.drafter, native=native, names=() if drafter is None else drafter.names,
        natively=drafter is not None and drafter.drafts_natively(view),
        drafts=drafter is not None, reads=bool(needs.hidden_layers),
        ruled=any(getattr(rule, how, None) is not None for rule in view.chooser.rules for how in ("mask", "forced")),
        acceptance=request.acceptance,
        watched=needs.choices or sequence.ranks > 0,
        chooser=describe(view.chooser, []), levels=view.cost.levels, nodes=view.cost.nodes, trims=view.cost.trims,
        reads_prompts=view.cost.reads, limit=sequence.limit,
    )  # fmt: skip
    return sequence.native


def known_rules(sequence: Sequence) -> tuple[list[Edit] | None, bool]:
    """The row's rules that C++ can take along its draft (None: not all that must be), and whether others are left that
    can test what it chooses."""
    chooser = sequence.chooser
    free = chooser.free
    return known_edits(free), free is not chooser


def propose(step: Step) -> None:
    """Drafters draft: native ones in one call, then those in Python, each for its rows."""
    rows, drafting, decoding = step.core.rows, step.core.drafting, step.plan.decoding
    left, failed = rows.propose()
    for where, why in failed:
        drafting.drafter_failed(decoding[where[0]].drafter, ValueError(why), [decoding[i] for i in where])
    if not left:
        return
    groups: dict[str, list[int]] = {}
    for i in left:
        groups.setdefault(decoding[i].drafter, []).append(i)
    nodes, depths, floors, starts = rows.sizes
    for name, where in groups.items():
        drafter = drafting.drafters[name]
        views = [drafting.view(decoding[i])._replace(in_step=rows.in_step(i)) for i in where]
        if drafter.cost.levels is not None:
            views = [
                view._replace(depth=depths[i], floor=floors[i], start=starts[i])
                for view, i in zip(views, where, strict=True)
            ]
        try:
            drafts = drafter.propose(views, np.array([nodes[i] for i in where], np.int32))
            if not isinstance(drafts, Drafts):
                raise TypeError(f"it proposed a {type(drafts).__name__}, and must propose Drafts: see Drafts.chains")
            rows.put(where, drafts)
            drafts = drafts.normalized(step.core.model.info.vocab_size)
        except Exception as error:
            rows.drop(where)
            # No room for its cache is no fault, and a rule's is a request's own, which ``verify`` meets.
            if not isinstance(error, (MemoryLimitError, RuleError)):
                drafting.drafter_failed(name, error, [decoding[i] for i in where])
        else:
            for j, i in enumerate(where):
                if drafts.q is not None:
                    step.q[i] = drafts.q[j]
                if drafter.needs.choices:
                    step.proposals[i] = drafts.row(j)


def apply_rules(step: Step) -> None:
    """Nodes that a rule forbids are dropped; tokens that must follow are drafted, with any drafter or none."""
    rows = step.core.rows
    for i in rows.ruled:
        sequence = step.plan.decoding[i]
        try:
            must = forced(sequence.chooser, min(sequence.size, sequence.room - 1))
            if must and min(must) >= 0 and max(must) < step.core.model.info.vocab_size:  # else it drafts nothing
                rows.lead(i, must, GRAMMAR)
            rows.keep(i, pruned(draft(step, i), sequence.chooser))
        except RuleError:  # ``verify`` meets it again, and ends the request
            rows.drop([i])


def draft(step: Step, i: int) -> Draft:
    """Row i's draft as it stands."""
    found, q = Draft(*step.core.rows.draft(i)), step.q.get(i)
    found.q = None if q is None else q[: len(found)]
    return found


# -- verdicts --------------------------------------------------------------------------------------------------------


def verify(step: Step) -> None:
    """Verdicts of all rows where the logits lie; rows that were not decided, or whose verdict has to be looked at, are
    walked here."""
    assert step.output is not None
    core, decoding, rows = step.core, step.plan.decoding, step.core.rows
    step.output.decide(rows, lambda: [s.chooser.free if s.request.acceptance == "coupled" else None for s in decoding])
    left = rows.undecided
    starts = rows.starts if left else ()
    for i in left:
        sequence = decoding[i]
        walk = Walk(sequence.chooser, sequence.request.acceptance, draft(step, i), int(starts[i]), step.output)
        tokens, path = rows.verdict(i)
        if not tokens or not walk.stands(tokens, path):
            tokens, path = walk.verdict()
            rows.decide(i, tokens, path)
        if sequence.ranks and core.drafting.drafts_for(sequence):
            rank(step, i, sequence)
        if walk.failure is not None:
            step.dead[i] = walk.failure
        if i in step.proposals:
            step.choices[i] = numbered(step.proposals[i], walk.draft, walk.every())


def rank(step: Step, i: int, sequence: Sequence) -> None:
    """Row i's drafter gets the target's likeliest tokens after the pending token and every node."""
    assert step.output is not None
    rows, drafting = step.core.rows, step.core.drafting
    starts, token = rows.starts, rows.batch[0]
    at = np.arange(starts[i], starts[i + 1], dtype=np.int32)
    ids = np.full((len(at), sequence.ranks), -1, np.int32)
    for n, found in enumerate(step.output.logprobs(at, token[at], [sequence.ranks] * len(at))):
        ids[n, : len(found.top)] = [one.token for one in found.top]
    drafter = drafting.drafters[sequence.drafter]
    drafting.attempt(sequence.drafter, [sequence], lambda arg: drafter.rank(sequence.row, *arg), (token[at], ids))


def places(proposed: Draft, kept: Draft) -> dict[int, int]:
    """The nodes of ``proposed`` that were kept, with their numbers in ``kept``; the pending token, -1, is itself. No
    two children of a node may have one token."""
    numbers = {(parent, token): n for n, (parent, token) in enumerate(zip(kept.parents, kept.tokens, strict=True))}
    found = {-1: -1}
    for node, (parent, token) in enumerate(zip(proposed.parents, proposed.tokens, strict=True)):
        number = numbers.get((found[parent], token)) if parent in found else None
        if number is not None:
            found[node] = number
    return found


def numbered(own: Draft, kept: Draft, choices: I32) -> I32:
    """Choices after ``kept``'s nodes, numbered as the drafter proposed them; -1 where a node was not verified."""
    place = places(own, kept)
    after = [int(choices[place[node] + 1]) if node in place else -1 for node in range(-1, len(own))]
    return np.array(after, np.int32)


def score(step: Step) -> None:
    """Log-probabilities for all rows and chunks that ask for them, in one call."""
    decoding, rows = step.plan.decoding, step.core.rows
    if not (any(s.request.params.wants_logprobs for s in decoding) or any(c.wanted for c in step.plan.chunks)):
        return
    assert step.output is not None
    starts = rows.starts
    asked: dict[int, tuple[Sequence, I32, I32, int]] = {}  # after which packed tokens, of which, and how many others
    for i, sequence in enumerate(decoding):
        if sequence.request.params.wants_logprobs:
            tokens, path = rows.verdict(i)
            n = len(tokens) - (i in step.dead)
            at = starts[i] + np.array([0, *(node + 1 for node in path)], np.int32)[:n]
            asked[i] = sequence, at, np.array(tokens[:n], np.int32), sequence.request.params.top_logprobs
    for b, chunk in enumerate(step.plan.chunks, len(decoding)):
        if chunk.wanted:
            sequence = chunk.sequence
            after = sequence.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
            at = starts[b] + np.arange(len(after), dtype=np.int32)
            asked[b] = sequence, at, after, sequence.request.params.prompt_logprobs or 0
    _, places, scored, _ = zip(*asked.values(), strict=True)
    tops = [top for _, at, _, top in asked.values() for _ in at]
    found = iter(step.output.logprobs(np.concatenate(places), np.concatenate(scored), tops))
    for i, (sequence, at, _, _) in asked.items():
        step.logprobs[i] = list(islice(found, len(at)))
        with suppress(TextError):  # figures without words are better than none
            step.logprobs[i] = sequence.spelled(step.logprobs[i])


def explain(step: Step) -> None:
    """What decided each row's tokens."""
    assert step.output is not None
    rows = step.core.rows
    for i, sequence in enumerate(step.plan.decoding):
        acceptance, start = sequence.request.acceptance, int(rows.starts[i])
        kept, verdict = draft(step, i), rows.verdict(i)
        step.explained[i] = explained(sequence.chooser, acceptance, kept, verdict, start, step.output)


def near_ties(step: Step, i: int, path: SequenceOf[int], kept: int) -> int:
    """How many of row i's first ``kept`` tokens are near-ties: see ``Output.near_ties``."""
    if step.output is None or step.core.model.native is not None:
        return 0
    at = step.core.rows.starts[i] + np.array([0, *(node + 1 for node in path)], np.int32)
    return step.output.near_ties(at[:kept])


# -- what the step changes -------------------------------------------------------------------------------------------


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


def commit(step: Step, outcomes: list[Outcome], ends: list[Extension]) -> None:
    """Sequences take up what they gained; the KV cache has the whole verdict already."""
    core, threads = step.core, step.output.threads if step.output is not None else 0
    for i, (sequence, row, end) in enumerate(zip(step.plan.decoding, outcomes, ends, strict=True)):
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
        sequence.commit(end, row.sources, step.logprobs.get(i, ()), length)
        near = near_ties(step, i, row.path, kept)
        sequence.count(Counted(kept, row.depth, row.named, row.path, row.size, row.expected, threads or None, near))
    for j, chunk in enumerate(step.plan.chunks):
        sequence, cached = chunk.sequence, chunk.start + chunk.count
        scored = sequence.prompt_logprobs
        if chunk.wanted:
            scored = [*(scored or [None]), *step.logprobs[len(outcomes) + j]]  # the first token follows nothing
        sequence.cached, sequence.prompt_logprobs = cached, scored
        if cached == sequence.branch or (cached == sequence.length - 1 and core.model.kv.windowed):
            core.model.kv.keep(sequence.row)


def hidden_states(step: Step, ends: SequenceOf[Extension]) -> dict[int, HiddenStates]:
    """By row of the batch: hidden states of the positions whose KV becomes final, for drafters in Python."""
    assert step.output is not None
    found: dict[int, HiddenStates] = {}
    starts = step.core.rows.starts
    for b, sequence in enumerate([*step.plan.decoding, *(chunk.sequence for chunk in step.plan.chunks)]):
        if not sequence.reads:
            continue
        at = np.arange(starts[b], starts[b + 1], dtype=np.int32)
        if b < len(ends):
            kept = max(len(ends[b].tokens), 1)
            at = starts[b] + np.array([0, *(n + 1 for n in step.core.rows.verdict(b)[1])], np.int32)[:kept]
        found[b] = step.output.hidden_states(at)
    return found


def tell(step: Step, ends: list[Extension], states: dict[int, HiddenStates], clock: Clock) -> None:
    """Who has ended leaves; then drafters, the policy and the callers get what the step has given."""
    core, plan, drafting = step.core, step.plan, step.core.drafting
    row_numbers = () if core.on_step is None else tuple(s.row for s in plan.decoding)
    for sequence in [s for s in plan.decoding if s.finish_reason]:
        core.clock(sequence, clock)
        core.leave(sequence)
    clock.start("draft")
    final = [(i, len(ends[i].tokens), s) for i, s in enumerate(plan.decoding) if s.row >= 0]
    final += [(j, chunk.count, chunk.sequence) for j, chunk in enumerate(plan.chunks, len(plan.decoding))]
    for name, entries in drafting.observing(final).items():
        if entries[0][2].listens:
            drafting.attempt(name, [s for _, _, s in entries], core.rows.observe, [(i, n) for i, n, _ in entries])
        entries = [(i, n, s) for i, n, s in entries if s.observes and drafting.drafts_for(s)]
        if entries:
            events = [event(step, i, n, s, states.get(i)) for i, n, s in entries]
            drafting.observe(name, [s for _, _, s in entries], events)
    reading = 0.0
    if plan.chunks or drafting.policy is not None:
        spent = clock.so_far()
        draft, body = spent["draft"], spent["target"] + spent["verify"] + spent["other"]
        if plan.chunks:
            reading = read_prompts(step, body)
        if drafting.policy is not None:
            core.rows.learn(draft, body, 0.0 if step.output is None else step.output.experts)
    clock.start("other")
    for sequence in plan.decoding:
        if sequence.row >= 0:
            core.clock(sequence, clock)
            core.send(sequence)
    if core.scheduler.pace.bounded:
        tokens = sum(chunk.count for chunk in plan.chunks)
        core.scheduler.pace.learn(tokens, bool(plan.decoding), clock.so_far()["target"] + reading)
    for chunk in plan.chunks:
        chunk.sequence.stats.prefill_seconds += sum(clock.so_far().values())
        core.scheduler.save(chunk.sequence)
    if core.on_step is not None:
        core.on_step(record(step, ends, row_numbers, clock))


def read_prompts(step: Step, body: float) -> float:
    """Draft models read the chunks of prompts that the target has just read, where drafts are expected to pay for it:
    piece by piece, so that no step waits for a whole prompt. The seconds that it took."""
    drafting, rows = step.core.drafting, step.core.rows
    found: dict[str, list[tuple[Sequence, int, int]]] = {}
    spent, new = 0.0, {chunk.sequence.row: chunk.count for chunk in step.plan.chunks}
    for chunk in step.plan.chunks:
        sequence = chunk.sequence
        if sequence.row < 0 or sequence.native is None or not drafting.reads_prompts(sequence):
            continue
        start, end = rows.reads(sequence.native), chunk.start + chunk.count
        if 0 <= start < end:
            found.setdefault(sequence.drafter, []).append((sequence, start, end))
    for name, beginnings in found.items():
        begun = time.perf_counter()
        given = [(s.row, s.tokens[:end], new[s.row], start) for s, start, end in beginnings]
        read = (
            drafting.attempt(name, [s for s, _, _ in beginnings], partial(_read, drafting.drafters[name]), given) or {}
        )
        seconds = time.perf_counter() - begun
        has = [(s.native, start, *read[s.row]) for s, start, _ in beginnings if s.native and s.row in read]
        rows.has_read(has, seconds, body)
        spent += seconds
    return spent


def _read(drafter: Drafter, rows: list[tuple[int, I32, int, int]]) -> dict[int, tuple[int, int]]:
    """What its ``read_prompts`` returns, checked: whoever calls this makes what it raises cost its rows alone."""
    found = {row: (int(end), int(count)) for row, (end, count) in drafter.read_prompts(rows).items()}
    lengths = {row: len(tokens) for row, tokens, _, _ in rows}
    if any(not 0 <= end <= lengths.get(row, -1) or count < 0 for row, (end, count) in found.items()):
        raise DrafterError(f"read_prompts returned {found} for rows of {lengths} tokens")
    return found


def event(step: Step, i: int, gained: int, sequence: Sequence, states: HiddenStates | None) -> Event:
    """What became final in a row of the batch that goes on."""
    if i < len(step.plan.decoding):
        tokens, path = step.core.rows.verdict(i)
        verdict = Verdict(np.array(tokens, np.int32), np.array(path, np.int32))
        start = sequence.length - gained
        return Event(sequence.row, start, sequence.tokens[start:], verdict, states, step.choices.get(i))
    chunk = step.plan.chunks[i - len(step.plan.decoding)]
    start = chunk.start + 1
    return Event(sequence.row, start, sequence.tokens[start : start + chunk.count], None, states)


def record(step: Step, ends: list[Extension], row_numbers: tuple[int, ...], clock: Clock) -> StepRecord:
    """The step for whoever watches steps."""
    core, plan, rows = step.core, step.plan, step.core.rows
    proposed, kept = Drafts(*rows.drafts(False)), Drafts(*rows.drafts(True))
    decisions = rows.decisions() or [Decision(n, None) for n in kept.widths.tolist()]
    found = []
    for i, (sequence, end) in enumerate(zip(plan.decoding, ends, strict=True)):
        draft, (tokens, path), gained = proposed.row(i), rows.verdict(i), len(end.tokens)
        nodes = list(range(len(draft))) if kept.widths[i] == len(draft) else sorted(places(draft, kept.row(i)))[1:]
        size, expected, why, worth = decisions[i]
        known = numbered_as_proposed(step.explained.get(i, Explained()), nodes, len(draft))
        found.append(RowRecord(
            sequence.request.id, sequence.sample, row_numbers[i], sequence.length - gained, tuple(draft.tokens),
            tuple(draft.parents), tuple(draft.gains), tuple(proposed.sources_of(i)), tuple(nodes), tuple(tokens),
            tuple(nodes[node] for node in path), gained, near_ties(step, i, path, gained), size, expected, why,
            tuple(worth), bool(draft) and i in step.q, known.p, known.q, known.places,
        ))  # fmt: skip
    chunks = (
        ChunkRecord(c.sequence.request.id, c.sequence.sample, c.sequence.row, c.start, c.count) for c in plan.chunks
    )
    seconds, faults = dict(clock.so_far()), tuple(core.drafting.faults)
    return StepRecord(next(core.steps), tuple(found), tuple(chunks), seconds, faults)
