"""What ``_native.Step`` leaves to Python, completed for the rows that need it: drafters and rules that are written in
Python, ``rejection`` and ``typical``, and models that are not the native one.

A function of ``STAGES`` takes the step as that stage left it; ``step.native.open`` are the rows that are left.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from outpace.common.arrays import F64, I32
from outpace.drafters.base import Event
from outpace.drafters.learned.picks import level_by_level
from outpace.engine.drafting import Drafting
from outpace.engine.scheduler import Plan
from outpace.engine.sequence import Extension, Sequence
from outpace.engine.text import TextError
from outpace.engine.walk import Walk
from outpace.errors import MemoryLimitError, RuleError
from outpace.exact.drafts import Draft, Drafts, Verdict, is_chain
from outpace.exact.rules import forced, pruned
from outpace.exact.sampling import TokenLogprob
from outpace.models.base import Batch, HiddenStates, Model, Output
from outpace.models.native.output import NativeOutput, describe, known_edits

GRAMMAR = "grammar"  # the source of tokens that a rule says must follow


@dataclass(slots=True)
class Step:
    """A step of B decoding rows and C chunks. ``native``: their drafts and verdicts, an ``_native.Step``; ``stages``:
    the model in C++, where it is there.

    What completing a row in Python leaves is kept by row: ``q`` [k, V], what each node was drawn from; ``dead``, why
    its rules left no token after what was accepted; ``choices`` int32 [k + 1], the target's choice after every node;
    ``logprobs`` of all tokens of its verdict, or of the prompt's that follow those of a chunk, by row of the batch;
    ``lost``, why its KV is in doubt.
    """

    plan: Plan
    model: Model
    drafting: Drafting
    native: Any
    stages: Any
    computed: Output | None = None  # by a model in Python
    asked: dict[int, Draft] = field(default_factory=dict)  # where a drafter reads choices: its own proposal
    q: dict[int, F64] = field(default_factory=dict)
    dead: dict[int, Exception] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    choices: dict[int, I32] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def output(self) -> Output:
        """Of the step's forward. Raises ValueError where there was none."""
        return NativeOutput(self.native.result) if self.computed is None else self.computed

    def ranks(self, sequence: Sequence) -> int:
        """How many of the target's likeliest tokens the row's drafter gets from Python; 0 where C++ has both."""
        drafter = self.drafting.drafter_of(sequence)
        return 0 if drafter is None or (drafter.native is not None and self.stages is not None) else drafter.needs.ranks


def admit(step: Step, sequence: Sequence) -> Any:
    """What stays as it is of a sequence while it has its row, for ``_native.Step.begin``."""
    request, drafting = sequence.request, step.drafting
    view, drafter, needs = drafting.view(sequence), drafting.drafter_of(sequence), drafting.needs_of(sequence)
    native = None if drafter is None else drafter.native
    sequence.listens = native is not None and bool(native.hidden_layers) and step.stages is not None
    sequence.native = step.native.row(
        row=sequence.row, request=request.id, prompt=sequence.prompt_length, adaptive=view.adaptive,
        drafter=view.drafter, native=native, names=() if drafter is None else drafter.names,
        natively=native is not None and not (needs.draws and level_by_level(view)),
        drafts=drafter is not None, reads=bool(needs.hidden_layers),
        ruled=any(getattr(rule, how, None) is not None for rule in view.chooser.rules for how in ("mask", "forced")),
        acceptance=request.acceptance,
        watched=needs.choices or step.ranks(sequence) > 0,
        chooser=describe(view.chooser, []), levels=view.cost.levels, nodes=view.cost.nodes, trims=view.cost.trims,
    )  # fmt: skip
    return sequence.native


def known_rules(sequence: Sequence) -> tuple[Any, bool]:
    """The row's rules that C++ can take along its draft (None: not all that must be), and whether others are left that
    can test what it chooses."""
    chooser = sequence.chooser
    free = chooser.free
    return known_edits(free), free is not chooser


# -- drafts ----------------------------------------------------------------------------------------------------------


def propose(step: Step) -> None:
    """Drafters in Python draft for their rows."""
    native, drafting, decoding = step.native, step.drafting, step.plan.decoding
    for where, why in native.failed:
        drafting.drafter_failed(decoding[where[0]].drafter, ValueError(why), [decoding[i] for i in where])
    groups: dict[str, list[int]] = {}
    for i in native.open:
        groups.setdefault(decoding[i].drafter, []).append(i)
    nodes, levels, floors = native.sizes
    for name, where in groups.items():
        drafter = drafting.drafters[name]
        views = [drafting.view(decoding[i]) for i in where]
        if drafter.cost.levels is not None:
            views = [view._replace(depth=levels[i], floor=floors[i]) for view, i in zip(views, where, strict=True)]
        try:
            drafts = drafter.propose(views, np.array([nodes[i] for i in where], np.int32))
            native.put(where, drafts)
        except (MemoryLimitError, RuleError):  # no room for its cache, or a request's own fault, which VERIFY meets
            native.drop(where)
        except Exception as error:
            native.drop(where)
            drafting.drafter_failed(name, error, [decoding[i] for i in where])
        else:
            for j, i in enumerate(where):
                if drafts.q is not None:
                    step.q[i] = drafts.q[j]
                if drafter.needs.choices:
                    step.asked[i] = drafts.row(j)


def rules(step: Step) -> None:
    """Nodes that a rule forbids are dropped; tokens that must follow are drafted, whether anybody was asked or not."""
    native = step.native
    most = [min(s.size, s.room - 1) for s in step.plan.decoding]
    for i in native.open:
        chooser = step.plan.decoding[i].chooser
        try:
            if must := forced(chooser, most[i]):
                native.lead(i, must, GRAMMAR)
            native.keep(i, pruned(draft(step, i), chooser))
        except RuleError:  # VERIFY meets it again, and ends the request
            native.drop([i])


def draft(step: Step, i: int) -> Draft:
    """Row i's draft as it stands."""
    found, q = Draft(*step.native.draft(i)), step.q.get(i)
    found.q = None if q is None else q[: len(found)]
    return found


def drafts(step: Step, *, kept: bool) -> Drafts:
    """All drafts, as they were proposed or are verified."""
    found = Drafts(*step.native.drafts(kept))
    if not step.q:
        return found
    q = found.one_hot(next(iter(step.q.values())).shape[1])
    for i, own in step.q.items():
        k = min(int(found.widths[i]), len(own))
        q[i, :k] = own[:k]
    return replace(found, q=q)


# -- forward, verdicts, KV -------------------------------------------------------------------------------------------


def forward(step: Step) -> None:
    """A model in Python computes."""
    hidden_rows = np.array(step.native.hidden_rows, np.bool_)
    needed = step.drafting.needs.hidden_layers if hidden_rows.any() else ()
    token, row, position, parent, starts, wanted = step.native.batch
    batch = Batch(token, row, position, parent, starts, wanted, needed, hidden_rows if needed else None)
    step.computed = step.model.forward(batch)


def rank(step: Step, i: int, sequence: Sequence, ranks: int) -> None:
    """Row i's drafter gets the target's likeliest tokens after the pending token and every node."""
    starts, token = step.native.starts, step.native.batch[0]
    at = np.arange(starts[i], starts[i + 1], dtype=np.int32)
    ids = np.full((len(at), ranks), -1, np.int32)
    for n, found in enumerate(step.output.logprobs(at, token[at], [ranks] * len(at))):
        ids[n, : len(found.top)] = [one.token for one in found.top]
    drafter = step.drafting.drafters[sequence.drafter]
    step.drafting.attempt(sequence.drafter, [sequence], lambda arg: drafter.rank(sequence.row, *arg), (token[at], ids))


def verify(step: Step) -> None:
    """Rows that were not decided, or whose verdict has to be looked at, are walked here."""
    native, decoding = step.native, step.plan.decoding
    starts = native.starts
    if step.stages is None and decoding:
        choosers = [s.chooser.free if s.request.acceptance == "coupled" else None for s in decoding]
        found = (
            step.output.verify(drafts(step, kept=True), starts[: len(decoding)], choosers) if any(choosers) else None
        )
        native.found(found)
    for i in native.open:
        sequence = decoding[i]
        walk = Walk(sequence.chooser, sequence.request.acceptance, draft(step, i), int(starts[i]), step.output)
        tokens, path = native.verdict(i)
        if not tokens or not walk.stands(tokens, path):
            tokens, path = walk.verdict()
            native.decide(i, tokens, path)
        if ranks := step.ranks(sequence):
            rank(step, i, sequence, ranks)
        if walk.failure is not None:
            step.dead[i] = walk.failure
        if i in step.asked:
            step.choices[i] = numbered(step.asked[i], walk.draft, walk.every())


def logprobs(step: Step) -> None:
    """Log-probabilities for all rows and chunks that ask for them, in one call."""
    starts, rows = step.native.starts, step.plan.decoding
    asked: dict[int, tuple[Sequence, I32, I32, int]] = {}  # after which packed tokens, of which, and how many others
    for i, sequence in enumerate(rows):
        if sequence.request.params.wants_logprobs:
            tokens, path = step.native.verdict(i)
            n = len(tokens) - (i in step.dead)
            at = starts[i] + np.array([0, *(node + 1 for node in path)], np.int32)[:n]
            asked[i] = sequence, at, np.array(tokens[:n], np.int32), sequence.request.params.top_logprobs
    for b, chunk in enumerate(step.plan.chunks, len(rows)):
        if chunk.wanted:
            sequence = chunk.sequence
            after = sequence.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, sequence.prompt_length)]
            at = starts[b] + np.arange(len(after), dtype=np.int32)
            asked[b] = sequence, at, after, sequence.request.params.prompt_logprobs or 0
    _, each, tokens, _ = zip(*asked.values(), strict=True)
    tops = [top for _, at, _, top in asked.values() for _ in at]
    found = iter(step.output.logprobs(np.concatenate(each), np.concatenate(tokens), tops))
    for i, (sequence, at, _, _) in asked.items():
        step.logprobs[i] = list(islice(found, len(at)))
        with suppress(TextError):  # figures without words are better than none
            step.logprobs[i] = sequence.spelled(step.logprobs[i])


def settle(step: Step) -> None:
    """The KV of a model in Python becomes what the verdicts say: all but their last tokens."""
    for i, sequence in enumerate(step.plan.decoding):
        own, (_, path) = draft(step, i), step.native.verdict(i)
        before = sequence.length - 1
        try:
            if not is_chain(own.parents):
                step.model.kv.compact(sequence.row, before, np.array([0, *(n + 1 for n in path)], np.int32))
            elif len(path) < len(own):
                step.model.kv.truncate(sequence.row, before + 1 + len(path))
        except Exception as error:
            step.lost[i] = repr(error)


# By number (native/step/step.h); the policy's two leave nothing. With the phase that their time counts for.
STAGES: dict[int, tuple[Callable[[Step], None], str]] = {
    1: (propose, "draft"),
    2: (rules, "draft"),
    4: (forward, "target"),
    5: (verify, "verify"),
    6: (settle, "verify"),
}
DONE = 7


def near_ties(step: Step, i: int, path: SequenceOf[int], kept: int) -> int:
    """How many of row i's first ``kept`` tokens are near-ties: see ``Output.near_ties``."""
    if step.computed is None:
        return 0
    at = step.native.starts[i] + np.array([0, *(node + 1 for node in path)], np.int32)
    return step.computed.near_ties(at[:kept])


# -- what became final -----------------------------------------------------------------------------------------------


def hidden_states(step: Step, ends: SequenceOf[Extension]) -> dict[int, HiddenStates]:
    """By row of the batch: hidden states of the positions whose KV becomes final, for drafters in Python."""
    found: dict[int, HiddenStates] = {}
    rows = [*step.plan.decoding, *(chunk.sequence for chunk in step.plan.chunks)]
    for b, sequence in enumerate(rows):
        if sequence.listens or not step.drafting.needs_of(sequence).hidden_layers:
            continue
        starts = step.native.starts
        at = np.arange(starts[b], starts[b + 1], dtype=np.int32)
        if b < len(ends):
            kept = max(len(ends[b].tokens), 1)
            at = starts[b] + np.array([0, *(n + 1 for n in step.native.verdict(b)[1])], np.int32)[:kept]
        found[b] = step.output.hidden_states(at)
    return found


def numbered(own: Draft, kept: Draft, choices: I32) -> I32:
    """Choices after ``kept``'s nodes, numbered as the drafter proposed them; -1 where a node was not verified."""
    numbers = {(parent, token): n for n, (parent, token) in enumerate(zip(kept.parents, kept.tokens, strict=True))}
    place = {-1: -1}
    for node, (parent, token) in enumerate(zip(own.parents, own.tokens, strict=True)):
        found = numbers.get((place[parent], token)) if parent in place else None
        if found is not None:
            place[node] = found
    after = [int(choices[place[node] + 1]) if node in place else -1 for node in range(-1, len(own))]
    return np.array(after, np.int32)


def event(step: Step, i: int, gained: int, sequence: Sequence, hidden_states: HiddenStates | None) -> Event:
    """What became final in a row of the batch that goes on."""
    if i < len(step.plan.decoding):
        tokens, path = step.native.verdict(i)
        verdict = Verdict(np.array(tokens, np.int32), np.array(path, np.int32))
        start = sequence.length - gained
        return Event(sequence.row, start, sequence.tokens[start:], verdict, hidden_states, step.choices.get(i))
    chunk = step.plan.chunks[i - len(step.plan.decoding)]
    start = chunk.start + 1
    return Event(sequence.row, start, sequence.tokens[start : start + chunk.count], None, hidden_states)
