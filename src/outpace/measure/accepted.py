"""What a drafter would have had accepted on recorded answers: one pass of the target, and no step of it for a drafter.

Under ``coupled`` the target's token after each beginning of its own answer is the answer's next one, so a draft is
accepted as far as it follows the answer. What a drafter reads of the target (hidden states, likeliest tokens) is known
of the answer's own tokens, but not of rejected nodes: ``recycle``, which learns from those too, is underestimated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
_ROW = 0  # the drafter's name of the row


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
    """A step as it would have been: after ``length`` committed tokens, ``nodes`` drafted in ``seconds``, of which
    ``gained`` - 1 were accepted. ``cold``: whether the target had swept the caches before."""

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


def replayed(drafter: Drafter, answer: Recorded, size: int, request: int, model: Model | None = None) -> list[Taken]:
    """The steps of the answer, if ``drafter`` were asked for ``size`` nodes in each, as the engine asks it.

    ``model``: the target, to run between the first drafts (None: only what is accepted matters). Raises DrafterError
    for a drafter that needs the target itself, or its choices after rejected nodes.
    """
    if drafter.needs.choices or drafter.needs.target_rows:
        raise DrafterError(f"{drafter.name} drafts with the target's own forwards: its acceptance has to be measured")
    try:
        return list(_steps(drafter, answer, size, request, model))
    finally:
        drafter.release(_ROW, answer.tokens)


def _steps(drafter: Drafter, answer: Recorded, size: int, request: int, model: Model | None) -> Iterator[Taken]:
    columns = [answer.layers.index(layer) for layer in drafter.needs.hidden_layers]
    tokens, length = answer.tokens, answer.prompt  # the last token of a prompt is pending
    chooser = Chooser.start(answer.params, answer.noise, (), tokens[: answer.prompt])

    def observe(start: int, end: int, verdict: Verdict | None) -> None:
        states = HostHiddenStates(answer.states[start - 1 : end - 1, columns]) if columns else None
        drafter.observe([Event(_ROW, start, tokens[start:end], verdict, states)])

    observe(1, length, None)
    step = 0
    while length < len(tokens):
        cold = model is not None and step < _COLD
        if model is not None and cold:
            sweep(model)
        most = min(size, answer.limit - length - 1)
        view = RowView(
            _ROW, request, tokens[:length], answer.limit, chooser.after(tokens[answer.prompt : length].tolist()),
            "coupled", drafter=drafter.name, cost=drafter.cost,
        )  # fmt: skip
        begun = time.perf_counter()
        draft = drafter.propose([view], np.array([most], np.int32)).row(0) if most > 0 else None
        spent = time.perf_counter() - begun
        path = np.zeros(0, np.int32) if draft is None else follow(draft, tokens[length:])
        gained = min(len(path) + 1, len(tokens) - length)
        if drafter.needs.ranks:
            known = answer.likeliest[length - 1 : length + gained - 1, : drafter.needs.ranks]
            drafter.rank(_ROW, tokens[length - 1 : length + gained - 1], np.ascontiguousarray(known))
        end = length + gained
        if end < len(tokens):
            begun = time.perf_counter()
            observe(length, end, Verdict(tokens[length:end], path))
            spent += time.perf_counter() - begun
        yield Taken(length, 0 if draft is None else len(draft), gained, spent, cold and step > 0)
        length, step = end, step + 1


def sweep(model: Model) -> None:
    """A forward of one token in a row of its own: weights pass through the caches as between two steps."""
    row = model.kv.alloc()
    try:
        model.forward(Batch.pack([row], [np.zeros(1, np.int32)], [0], [False]))
    finally:
        model.kv.free(row)


def drafting_seconds(steps: Sequence[Taken]) -> float:
    """Seconds of drafting a step, once the prompt is read: the mean of those that the target ran before."""
    cold = [step.seconds for step in steps if step.cold]
    return float(np.mean(cold)) if cold else 0.0
