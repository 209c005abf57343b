"""Are two outputs the same, and if not, how near was the tie?

Two backends, dtypes or widths may add numbers in another order. A first difference whose scores, noise included, lie
closer than ``NEAR_TIE`` is such a rounding; a larger gap is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outpace.common.arrays import F64, I32
from outpace.engine.engine import Engine
from outpace.engine.results import Result
from outpace.errors import Argument, ParameterError
from outpace.exact.noise import Noise
from outpace.measure.scores import gap_between, scores_along
from outpace.params import SamplingParams

NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output index at which two outputs part, and how far apart their tokens' scores are there."""

    index: int
    gap: float
    tokens: tuple[int | None, int | None]  # None: that output had ended

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "DIFFERENT"
        a, b = ("ended" if token is None else str(token) for token in self.tokens)
        return f"{kind} at token {self.index} ({a} / {b}, score gap {self.gap:.2g})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such a gap is None."""
        gap = self.gap if math.isfinite(self.gap) else None
        return {"index": self.index, "gap": gap, "tokens": list(self.tokens), "near_tie": self.near_tie}


def promises_tokens(acceptance: str, params: SamplingParams) -> bool:
    """Whether plain decoding's very tokens are promised: under ``coupled`` always, under the others when greedy."""
    return acceptance == "coupled" or params.greedy


def require_tokens(acceptance: str, params: SamplingParams) -> None:
    """Raise ParameterError where a comparison token by token would call a keeper of its promise a bug."""
    if not promises_tokens(acceptance, params):
        raise ParameterError(
            Argument("acceptance", acceptance),
            " promises the same distribution, not the same tokens, so there is nothing to compare: use ",
            Argument("acceptance", "coupled"),
            ", or ",
            Argument("temperature", 0),
        )


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first index at which two lists, of tokens say, differ (one may end there); None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(engine: Engine, prompt: I32, params: SamplingParams, plain: Result, other: Result) -> Difference | None:
    """None when ``other`` has ``plain``'s tokens; else the first difference, its gap measured on the engine's target.

    ``prompt`` int32 [P]: the ids both answered. The engine must be idle.
    """
    noise = Noise(plain.seed, plain.sample)
    return compare_tokens(engine, prompt, params, noise, plain.token_ids, other.token_ids)


def compare_tokens(
    engine: Engine, prompt: I32, params: SamplingParams, noise: Noise, plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """``compare`` for outputs of which only the token ids are at hand; ``noise`` is what both were chosen with."""
    index = first_difference(plain, other)
    if index is None:
        return None
    a, b = (int(ids[index]) if index < len(ids) else None for ids in (plain, other))
    gap = math.inf  # one has ended: the tokens before are the same, so nothing about a score explains it
    if a is not None and b is not None:
        gap = score_gap(engine, prompt, plain[:index], a, b, params, noise)
    return Difference(index, gap, (a, b))


def score_gap(
    engine: Engine, prompt: I32, output: Sequence[int], a: int, b: int, params: SamplingParams, noise: Noise
) -> float:
    """How far the worse of tokens ``a`` and ``b`` is below the best score of all, after ``prompt`` + ``output``.

    Two tokens that are close to each other but far below the best are no near-tie: neither should have been chosen.
    """
    return gap_between(scores_after(engine, prompt, output, params, noise), a, b)


def scores_after(engine: Engine, prompt: I32, output: Sequence[int], params: SamplingParams, noise: Noise) -> F64:
    """The scores [V] that the choice after ``prompt`` + ``output`` maximises, from a forward of width 1."""
    model, tokenizer = engine.model, engine.tokenizer
    (scores,) = scores_along(model, tokenizer, prompt, output, params, noise, first=len(output))
    return scores
