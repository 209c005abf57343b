"""Are two outputs the same? If not, where they first differ, and how near the tie was.

Two backends, dtypes or widths may add numbers in another order. A first difference of tokens whose scores, noise
included, lie closer than ``NEAR_TIE`` is such a rounding; a larger gap is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outpace.common.arrays import F64, I32
from outpace.engine.intake import encoder
from outpace.errors import Argument, ParameterError
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch, Model
from outpace.params import SamplingParams

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result
    from outpace.text.tokenizer import Tokenizer

NEAR_TIE = 1e-3
_CHUNK = 128  # positions a forward: their logits are held at once
_SHOWN = 20  # characters of a text from its first difference on


@dataclass(frozen=True, slots=True)
class Output:
    """An answer, as far as it is known: what is None is not compared.

    ``tokens``: their ids, or their texts where a server tells no ids; ``logprobs``: of the tokens, in nats; ``finish``:
    why it ended.
    """

    tokens: tuple[int, ...] | tuple[str, ...] | None = None
    text: str | None = None
    logprobs: tuple[float, ...] | None = None
    finish: str | None = None

    @classmethod
    def of(cls, result: Result) -> Output:
        """The engine's ``result``."""
        return cls(result.token_ids, result.text, tuple(one.logprob for one in result.logprobs), result.finish_reason)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one between two outputs.

    ``what``: "token"; "text"; "finish"; "logprob": the tokens are the same, the bits are not; or what else was
    compared. ``index``: a token's, or a character's of the text. ``values``: what each of the two has there (None: it
    had ended). ``gap``: how far the worse of two tokens scores below the best, noise included; None where no score
    decides or it is not known.
    """

    what: str
    index: int
    values: tuple[Any, Any]
    gap: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.what == "token" and self.gap is not None and self.gap < NEAR_TIE

    def __str__(self) -> str:
        kind = "" if self.what in ("token", "text") else f"{self.what} "
        kind += "near-tie" if self.near_tie else "DIFFERENT"
        unit = "character" if self.what == "text" else "token"
        a, b = ("ended" if value is None else repr(value) for value in self.values)
        gap = "" if self.gap is None else f", score gap {self.gap:.2g}"
        return f"{kind} at {unit} {self.index} ({a} / {b}{gap})"

    def to_dict(self, *names: str) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such a gap is None. ``names``: of the two values (default:
        "tokens" has both)."""
        values = dict(zip(names, self.values, strict=True)) if names else {"tokens": list(self.values)}
        gap = self.gap if self.gap is not None and math.isfinite(self.gap) else None
        return {"what": self.what, "index": self.index, **values, "gap": gap, "near_tie": self.near_tie}


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


def difference(a: Output, b: Output) -> Difference | None:
    """The first one in what is known of both: in tokens, else in text, else in how they ended, else in the bits of
    log-probabilities. It has no gap yet."""
    known: list[tuple[str, Any, Any]] = [
        ("token", a.tokens, b.tokens), ("text", a.text, b.text), ("finish", a.finish, b.finish),
        ("logprob", a.logprobs, b.logprobs),
    ]  # fmt: skip
    for what, x, y in known:
        if x is None or y is None or (at := first_difference(x, y)) is None:
            continue
        if what == "text":
            return Difference(what, at, (x[at : at + _SHOWN], y[at : at + _SHOWN]))
        if what == "finish":
            return Difference(what, len(a.tokens or b.tokens or a.text or ""), (x, y))
        return Difference(what, at, (x[at] if at < len(x) else None, y[at] if at < len(y) else None))
    return None


def compare(
    engine: Engine, prompt: I32, params: SamplingParams, noise: Noise, a: Sequence[int], b: Sequence[int]
) -> Difference | None:
    """The first difference of two outputs' token ids, with its gap, measured on the engine's target.

    ``prompt`` int32 [P]: the ids both answered; ``noise``: what both were chosen with. The engine must be idle.
    """
    parted = difference(Output(tuple(a)), Output(tuple(b)))
    if parted is None or None in parted.values:
        return parted
    target = engine.model, engine.tokenizer
    return replace(parted, gap=score_gap(target, prompt, a[: parted.index], parted.values, params, noise))


# -- scores ----------------------------------------------------------------------------------------------------------

Target = tuple[Model, "Tokenizer | None"]  # the tokenizer: for rules that speak of text


def score_gap(
    target: Target, prompt: I32, output: Sequence[int], tokens: tuple[int, int], params: SamplingParams, noise: Noise
) -> float:
    """How far the worse of two tokens is below the best score of all, after ``prompt`` + ``output``.

    Two tokens that are close to each other but far below the best are no near-tie: neither should have been chosen.
    Raises MemoryLimitError.
    """
    (scores,) = scores_along(target, prompt, output, params, noise, first=len(output))
    return gap_between(scores, tokens)


def gap_between(scores: F64, tokens: tuple[int, int]) -> float:
    """``score_gap`` of scores [V] that are there."""
    return float(scores.max() - scores[list(tokens)].min())


def scores_along(
    target: Target, prompt: I32, output: Sequence[int], params: SamplingParams, noise: Noise, first: int = 0
) -> Iterator[F64]:
    """For each index ``first`` .. len(output) of the output: the scores [V] that the choice there maximises.

    ``prompt`` int32 [P]. One prefill and no decoding, in a row of the model's KV that is free again afterwards. Raises
    MemoryLimitError.
    """
    model, tokenizer = target
    rules = rules_for(params, model.info.vocab_size, encoder(tokenizer), model.info.eos_ids)
    chooser = Chooser.start(params, noise, rules, prompt).after(output[:first])
    tokens = np.concatenate([prompt, np.asarray(output, np.int32)]).astype(np.int32)
    wanted = len(prompt) - 1 + first  # the position after which the first choice is made
    row = model.kv.alloc()
    try:
        at = 0
        while at < len(tokens):
            stop = min(at + _CHUNK, wanted if at < wanted else len(tokens))
            out = model.forward(Batch.pack([row], [tokens[at:stop]], [at], [at >= wanted]))
            if at >= wanted:
                logits = out.logits(np.arange(stop - at, dtype=np.int32))
                for i, position in enumerate(range(at, stop)):
                    yield chooser.scores(logits[i])
                    if position + 1 < len(tokens):
                        chooser = chooser.advance(int(tokens[position + 1]))
            at = stop
    finally:
        model.kv.free(row)


def margins_along(
    target: Target, prompt: I32, output: Sequence[int], params: SamplingParams, noise: Noise
) -> list[float]:
    """How far each output token's score [n] lies above the best of all others; negative where it was not the best."""
    margins = []
    for token, scores in zip(output, scores_along(target, prompt, output[:-1], params, noise), strict=True):
        score = float(scores[token])
        scores[token] = -np.inf
        margins.append(score - float(scores.max()))
    return margins
