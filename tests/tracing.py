"""Traced runs of a toy engine: chains and trees, several requests, samples, chunks; and what may go wrong with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.control.cost import Cost
from outpace.drafters.base import RowView, TreeDrafter
from outpace.engine.engine import Engine
from outpace.engine.request import StepRecord
from outpace.engine.results import Result
from outpace.exact.drafts import Draft
from outpace.measure.trace import Trace, read, tracing
from outpace.params import SamplingParams
from tests.toy import ToyModel, ToyTokenizer

VOCAB = 7
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3, 4, 5], {"max_tokens": 14}),
    ([2, 2, 1], {"max_tokens": 11, "temperature": 0.9, "seed": 2**63 + 5, "n": 3, "top_k": 5}),
    ([6], {"max_tokens": 1}),
    (
        [4, 1, 4, 1, 4, 1, 3],
        {"max_tokens": 12, "temperature": 1.1, "seed": 9, "logit_bias": {0: 1.5, 1: -math.inf}},
    ),
    (
        [3, 5],
        {
            "max_tokens": 9, "temperature": 1.0, "seed": 1, "repetition_penalty": 1.4, "stop": ["ab", "cd"],
            "bad_words": ["ge"],
        },
    ),
]  # fmt: skip


class Branches(TreeDrafter):
    """The likeliest tokens one after another, with worse ones beside some of them: what is sampled leaves the path."""

    name = "branches"

    def __init__(self, model: ToyModel) -> None:
        self._model = model

    def trees(self, rows: Sequence[RowView], sizes: Sequence[int]) -> list[Draft]:
        return [self._tree(view, size) for view, size in zip(rows, sizes, strict=True)]

    def _tree(self, view: RowView, size: int) -> Draft:
        tree, prefix, parent, gain = Draft(), view.tokens.tolist(), -1, 0.9
        while len(tree) < size:
            guess = int(self._model.logits_after(prefix).argmax())
            if len(tree) + 1 < size and len(prefix) % 2:
                tree.add((guess + 1) % VOCAB, parent, gain / 3)
            parent = tree.add(guess, parent, gain)
            prefix.append(guess)
            gain *= 0.8
        return tree


class Swapped(ToyModel):
    """After ``prefix``, the logit of ``token`` is the others' best plus ``by``."""

    def __init__(self, prefix: list[int], token: int, by: float) -> None:
        super().__init__(VOCAB)
        self._prefix, self._token, self._by = prefix, token, by

    def logits_after(self, prefix: list[int], layers: int | None = None) -> F32:
        logits = super().logits_after(prefix, layers)
        if list(prefix) == self._prefix:
            logits = logits.copy()
            logits[self._token] = np.delete(logits, self._token).max() + self._by
        return logits


class Spelled(ToyTokenizer):
    def token(self, token_id: int) -> str:
        return chr(97 + token_id)


def engine(seed: int = 0, *, model: ToyModel | None = None, size: int | str = 5, **options: Any) -> Engine:
    """``size`` "auto": by the third step a part of what is proposed is verified, whatever steps take."""
    model = model or ToyModel(VOCAB, seed=seed)
    flat = Cost((1, 64), (1.0, 1.0 + 1e-6))
    return Engine(model, Spelled(), drafter=Branches(model), size=size, prefill_chunk=3, cost=flat, **options)


def record(
    path: Path,
    requests: Sequence[tuple[list[int], dict[str, Any]]] = REQUESTS,
    *,
    made: Engine | None = None,
    scores: bool = False,
    **options: Any,
) -> tuple[Trace, list[StepRecord], list[Result]]:
    """Run requests together under a trace: the trace as read, and what the engine itself told."""
    made = made or engine()
    steps: list[StepRecord] = []
    results: list[Result] = []
    with made, tracing(made, path, scores=scores) as writer:
        written = writer.step
        made.on_step = lambda step: (steps.append(step), written(step))  # type: ignore[func-returns-value]
        for prompt, params in requests:
            made.add(prompt, SamplingParams(**{"seed": 0, **params}), **options)
        while not made.idle:
            results += [delta.result for delta in made.step() if delta.result is not None]
            made.check()
    return read(path), steps, results


def ids(*tokens: int) -> I32:
    return np.array(tokens, np.int32)
