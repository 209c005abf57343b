"""What a drafter would have had accepted on recorded answers: one pass of the target, and no step of it for a drafter.

Under ``coupled`` the target's token after each beginning of its own answer is the answer's next one, so a draft is
accepted as far as it follows the answer. What a drafter reads of the target (hidden states, likeliest tokens) is known
of the answer's own tokens, but not of rejected nodes: ``recycle``, which learns from those too, is underestimated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.base import Drafter, Event, RowView
from outpace.drafters.composed import follow
from outpace.errors import DrafterError
from outpace.exact.drafts import Verdict
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, HostHiddenStates, Model
from outpace.params import SamplingParams

_CHUNK = 128  # positions a forward: their logits are held at once
_COLD = 8  # steps of an answer before which the target runs once, so that the caches are as they are between forwards


@dataclass(frozen=True, slots=True)
class Recorded:
    """A plain answer. ``tokens`` int32 [L]: the prompt's ``prompt`` ones, then the answer; ``limit``: the most that the
    sequence could have had. ``states`` float32 [L - 1, T, H] of ``layers``; ``likeliest`` int32 [L - 1, R]."""

    tokens: I32
    prompt: int
    limit: int
    params: SamplingParams
    noise: Noise
    layers: tuple[int, ...]
    states: F32
    likeliest: I32


@dataclass(frozen=True, slots=True)
class Taken:
    """A row's step as it would have been: after ``length`` committed tokens, ``nodes`` drafted in ``seconds`` (a row's
    share), of which ``gained`` - 1 were accepted. ``cold``: whether the target had swept the caches before."""

    length: int
    nodes: int
    gained: int
    seconds: float
    cold: bool


def record(
    model: Model,
    tokens: I32,
    prompt: int,
    params: SamplingParams,
    noise: Noise,
    *,
    layers: tuple[int, ...] = (),
    ranks: int = 0,
) -> Recorded:
    """Read a plain answer once, keeping the outputs of ``layers`` and the ``ranks`` likeliest tokens after each one.

    Raises MemoryLimitError. The row that it takes is free again.
    """
    states, likeliest = (
        [np.zeros((0, len(layers), model.info.hidden_size), np.float32)],
        [np.zeros((0, ranks), np.int32)],
    )
    row = model.kv.alloc()
    try:
        for at in range(0, len(tokens) - 1 if layers or ranks else 0, _CHUNK):
            piece = tokens[at : min(at + _CHUNK, len(tokens) - 1)]
            here = np.arange(len(piece), dtype=np.int32)
            out = model.forward(Batch.pack([row], [piece], [at], [ranks > 0], hidden_layers=layers))
            if layers:
                states.append(out.hidden_states(here).numpy().copy())
            if ranks:
                likeliest.append(np.argsort(-out.logits(here), axis=1, kind="stable")[:, :ranks].astype(np.int32))
    finally:
        model.kv.free(row)
    longest = model.info.max_length
    limit = longest if params.max_tokens is None else min(prompt + params.max_tokens, longest)
    return Recorded(tokens, prompt, limit, params, noise, layers, np.concatenate(states), np.concatenate(likeliest))


def replayed(
    drafter: Drafter, answers: Sequence[Recorded], size: int, request: int, model: Model | None = None
) -> list[list[Taken]]:
    """The steps of each of the answers, decoded together, if ``drafter`` were asked for ``size`` nodes in each, as the
    engine asks it. ``request``: the first answer's id; the others' ids follow.

    ``model``: the target, to run between the first drafts (None: only what is accepted matters). Raises DrafterError
    for a drafter that needs the target itself, or its choices after rejected nodes.
    """
    if drafter.needs.choices or drafter.needs.target_rows:
        raise DrafterError(f"{drafter.name} drafts with the target's own forwards: its acceptance has to be measured")
    rows = [_Row(drafter, i, request + i, answer) for i, answer in enumerate(answers)]
    try:
        drafter.observe([row.event(1, row.length, None) for row in rows])
        step = 0
        while going := [row for row in rows if row.length < len(row.answer.tokens)]:
            _step(drafter, going, size, model if step < _COLD else None, first=step == 0)
            step += 1
    finally:
        for row in rows:
            drafter.release(row.number, row.answer.tokens)
    return [row.taken for row in rows]


class _Row:
    """An answer on its way. ``length``: committed tokens; the last token of a prompt is pending."""

    def __init__(self, drafter: Drafter, number: int, request: int, answer: Recorded) -> None:
        self.number, self.answer, self.length = number, answer, answer.prompt
        self.taken: list[Taken] = []
        self._drafter, self._request = drafter, request
        self._columns = [answer.layers.index(layer) for layer in drafter.needs.hidden_layers]
        self._chooser = Chooser.start(answer.params, answer.noise, (), answer.tokens[: answer.prompt])

    @property
    def room(self) -> int:
        """Nodes that may be drafted."""
        return self.answer.limit - self.length - 1

    def event(self, start: int, end: int, verdict: Verdict | None) -> Event:
        answer, columns = self.answer, self._columns
        states = HostHiddenStates(answer.states[start - 1 : end - 1, columns]) if columns else None
        return Event(self.number, start, answer.tokens[start:end], verdict, states)

    def view(self) -> RowView:
        answer = self.answer
        chooser = self._chooser.after(answer.tokens[answer.prompt : self.length].tolist())
        return RowView(
            self.number, self._request, answer.tokens[: self.length], answer.limit, chooser, "coupled",
            drafter=self._drafter.name, cost=self._drafter.cost,
        )  # fmt: skip


def _step(drafter: Drafter, rows: Sequence[_Row], size: int, model: Model | None, *, first: bool) -> None:
    """One step of rows that are not whole yet; ``model`` runs before."""
    if model is not None:
        sweep(model)
    asked = [row for row in rows if row.room > 0 and size]
    views = [row.view() for row in asked]
    begun = time.perf_counter()
    drafts = drafter.propose(views, np.array([min(size, row.room) for row in asked], np.int32)) if asked else None
    spent = time.perf_counter() - begun
    found = {} if drafts is None else {row.number: drafts.row(i) for i, row in enumerate(asked)}
    events, taken = [], []
    for row in rows:
        tokens, length, draft = row.answer.tokens, row.length, found.get(row.number)
        path = np.zeros(0, np.int32) if draft is None else follow(draft, tokens[length:])
        row.length = end = min(length + len(path) + 1, len(tokens))
        if drafter.needs.ranks:
            known = row.answer.likeliest[length - 1 : end - 1, : drafter.needs.ranks]
            drafter.rank(row.number, tokens[length - 1 : end - 1], np.ascontiguousarray(known))
        if end < len(tokens):
            events.append(row.event(length, end, Verdict(tokens[length:end], path)))
        taken.append((length, 0 if draft is None else len(draft), end - length))
    begun = time.perf_counter()
    drafter.observe(events)
    spent += time.perf_counter() - begun
    for row, facts in zip(rows, taken, strict=True):
        row.taken.append(Taken(*facts, spent / len(rows), model is not None and not first))


def sweep(model: Model) -> None:
    """A forward of one token in a row of its own: weights pass through the caches as between two steps."""
    row = model.kv.alloc()
    try:
        model.forward(Batch.pack([row], [np.zeros(1, np.int32)], [0], [False]))
    finally:
        model.kv.free(row)


def drafting_seconds(steps: Mapping[int, Sequence[Taken]]) -> dict[int, float]:
    """Seconds of drafting a row's step by size, once the prompt is read: medians of the steps that the target ran
    before, all raised alike to give the whole time, since what disturbs a step does not depend on the size."""
    cold = {size: [step.seconds for step in taken if step.cold] for size, taken in steps.items()}
    medians = {size: float(np.median(seconds)) if seconds else 0.0 for size, seconds in cold.items()}
    usual = sum(medians[size] * len(seconds) for size, seconds in cold.items())
    raised = sum(map(sum, cold.values())) / usual if usual else 1.0
    return {size: raised * median for size, median in medians.items()}
