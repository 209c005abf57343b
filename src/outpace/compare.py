"""Are two outputs the same, and if not, how near was the tie?

Two backends, dtypes or widths may add numbers in another order. A first difference whose scores, noise included, lie
closer than ``NEAR_TIE`` is such a rounding; a larger gap is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from outpace.engine import Engine
from outpace.models.base import Batch
from outpace.noise import Noise
from outpace.rules import rules_for
from outpace.sampling import Chooser
from outpace.types import F64, I32, Result, SamplingParams

NEAR_TIE = 1e-3
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output index at which two outputs part, and the gap between the two tokens' scores there."""

    index: int
    gap: float
    tokens: tuple[int | None, int | None]  # None: that output had ended

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "DIFFERENT"
        return f"{kind} at token {self.index} ({self.tokens[0]} / {self.tokens[1]}, score gap {self.gap:.2g})"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "near_tie": self.near_tie}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two token lists differ (one may end there); None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(engine: Engine, prompt: I32, params: SamplingParams, plain: Result, other: Result) -> Difference | None:
    """None when ``other`` has ``plain``'s tokens; else the first difference, its gap measured on the engine's target.

    ``prompt`` int32 [P]: the ids both answered. The engine must be idle.
    """
    index = first_difference(plain.token_ids, other.token_ids)
    if index is None:
        return None
    ids = [r.token_ids[index] if index < len(r.token_ids) else None for r in (plain, other)]
    gap = float("inf")  # one has ended: the tokens before are the same, so nothing about a score explains it
    if ids[0] is not None and ids[1] is not None:
        scores = scores_after(engine, prompt, plain.token_ids[:index], params, Noise(plain.seed, plain.sample))
        gap = abs(float(scores[ids[0]] - scores[ids[1]]))
    return Difference(index, gap, (ids[0], ids[1]))


def scores_after(engine: Engine, prompt: I32, output: Sequence[int], params: SamplingParams, noise: Noise) -> F64:
    """The scores [V] that the choice after ``prompt`` + ``output`` maximises, from a forward of width 1."""
    model = engine.model
    rules = rules_for(params, model.info.vocab_size)
    chooser = Chooser.start(params, noise, rules, prompt)
    for token in output:
        chooser = chooser.advance(int(token))
    tokens = np.concatenate([prompt, np.asarray(output, np.int32)]).astype(np.int32)
    row = model.kv.alloc(len(tokens))
    try:
        for start in range(0, len(tokens) - 1, _CHUNK):
            chunk = tokens[start : min(start + _CHUNK, len(tokens) - 1)]
            model.forward(Batch.pack([row], [chunk], [start], [False]))
        logits = model.forward(Batch.pack([row], [tokens[-1:]], [len(tokens) - 1], [True])).logits(
            np.zeros(1, np.int32)
        )
        return chooser.scores(logits[0])
    finally:
        model.kv.free(row)
