"""Compares recorded answers with what a request gets now: the recorded tokens are drafted, so that each forward checks
as many as fit.

The target chooses every token again, under the request's parameters and noise, whatever else runs and whoever drafted
then. So an answer that was changed in one token departs from its replay in that token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from outpace.common.arrays import F32, I32
from outpace.engine.engine import Engine
from outpace.engine.results import Result
from outpace.errors import Argument, ParameterError
from outpace.exact.noise import Noise, Stream
from outpace.exact.sampling import scores
from outpace.measure.compare import NEAR_TIE, first_difference, require_tokens
from outpace.measure.scores import gap_between
from outpace.params import SamplingParams

_LIKE_STOP = ("tool_calls", "function_call")  # what OpenAI calls an answer that stopped after a call


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sample's answer. What is None was not recorded, and is not compared. ``logprobs``: of its tokens, in
    nats; ``finish``: "stop" or "length"."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    logprobs: tuple[float, ...] | None = None
    finish: str | None = None

    @classmethod
    def of(cls, result: Result) -> Recorded:
        """The engine's ``result``."""
        logprobs = tuple(entry.logprob for entry in result.logprobs)
        return cls(result.token_ids, result.text, logprobs, result.finish_reason)


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a replay first left its record: in ``what`` (token, logprob, text, finish), at ``index``: a token's, a
    character's of the text. ``gap``: how far the worse of two tokens scores below the best, noise included; None where
    no score decides."""

    what: str
    index: int
    recorded: Any
    now: Any
    gap: float | None = None

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: such a gap is None."""
        gap = self.gap if self.gap is not None and math.isfinite(self.gap) else None
        return {**asdict(self), "gap": gap, "near_tie": self.near_tie}


class Drafted:
    """A logit rule that changes nothing and has recorded answers drafted: while a row's tokens are those of one of
    them, the rest of that answer is proposed. One serves one replay.

    ``watched``: answer -> index of the token of which the logits are kept, so that ``gap`` can say how near it was.
    """

    def __init__(self, answers: Sequence[Sequence[int]], watched: Mapping[int, int] | None = None) -> None:
        self._answers = [tuple(answer) for answer in answers]
        self._watched = dict(watched or {})
        self._seen: dict[int, F32] = {}

    def start(self, prompt: I32) -> tuple[int, tuple[int, ...]]:
        return 0, tuple(range(len(self._answers)))

    def advance(self, state: tuple[int, tuple[int, ...]], token: int) -> tuple[int, tuple[int, ...]]:
        index, alike = state
        return index + 1, tuple(i for i in alike if self._answers[i][index : index + 1] == (token,))

    def apply(self, state: tuple[int, tuple[int, ...]], logits: F32) -> None:
        index, alike = state
        for answer in alike:
            if self._watched.get(answer) == index:
                self._seen[answer] = logits.copy()

    def forced(self, state: tuple[int, tuple[int, ...]]) -> Sequence[int]:
        index, alike = state
        return self._answers[alike[0]][index:] if alike else ()

    def gap(self, answer: int, found: Departure, params: SamplingParams, noise: Noise) -> float | None:
        """How far the worse of a departure's two tokens scores below the best; None where no score decides."""
        logits = self._seen.get(answer)
        if logits is None or not 0 <= found.recorded < len(logits):
            return None
        return gap_between(scores(logits, params, noise, found.index, Stream.CHOICE), found.recorded, found.now)


def prepared(
    engine: Engine, params: SamplingParams, recorded: Sequence[Recorded], acceptance: str
) -> tuple[SamplingParams, dict[str, Any]]:
    """The parameters and options of ``Engine.prepare`` under which ``recorded``, the answers to one prompt or more, are
    generated again.

    Raises ParameterError where the tokens are not promised, the seed is not known, or nothing was written down.
    """
    require_tokens(acceptance, params)
    if params.seed is None and not params.greedy:
        raise ParameterError(Argument("seed"), " is missing: give the one that the answer was drawn with")
    for i, answer in enumerate(recorded):
        if answer.token_ids is None and answer.text is None:
            raise ParameterError(f"answer {i} has neither token ids nor text, so there is nothing to replay: give one")
    wants = any(answer.logprobs is not None for answer in recorded)
    nodes = engine.options.nodes
    options: dict[str, Any] = {"acceptance": acceptance, "drafter": None if nodes else False, "size": nodes or None}
    rule = Drafted([_guess(engine, answer) for answer in recorded])
    return params.with_(rules=(*params.rules, rule), logprobs=params.logprobs or wants), options


def watching(
    engine: Engine, params: SamplingParams, recorded: Sequence[Recorded], found: Sequence[Departure | None]
) -> tuple[SamplingParams, Drafted] | None:
    """For a second run, no longer than it must be, which measures the gaps of ``found``; None where there are none."""
    watched = {
        i: departed.index
        for i, departed in enumerate(found)
        if departed is not None and departed.what == "token" and None not in (departed.recorded, departed.now)
    }
    if not watched:
        return None
    rule = Drafted([_guess(engine, answer) for answer in recorded], watched)
    most = max(max(watched.values()) + 1, params.min_tokens)
    return params.with_(rules=(*params.rules, rule), max_tokens=most), rule


def _guess(engine: Engine, answer: Recorded) -> tuple[int, ...]:
    """The tokens that the answer may have had: a draft may be wrong."""
    ids = answer.token_ids
    if ids is None:
        ids = () if engine.tokenizer is None else engine.tokenizer.encode(answer.text or "", add_special=False).tolist()
    known = engine.model.info.vocab_size
    return tuple(itertools.takewhile(lambda token: 0 <= token < known, ids))


def departure(recorded: Recorded, now: Recorded) -> Departure | None:
    """The first difference: in tokens, else in their logprobs' bits, else in text, else in how it ended."""
    for what, a, b in (("token", recorded.token_ids, now.token_ids), ("logprob", recorded.logprobs, now.logprobs)):
        if a is not None and b is not None and (index := first_difference(a, b)) is not None:
            return Departure(what, index, *(side[index] if index < len(side) else None for side in (a, b)))
    if recorded.text is not None and recorded.text != now.text:
        text = now.text or ""
        index = next((i for i, (x, y) in enumerate(zip(recorded.text, text, strict=False)) if x != y), None)
        at = min(len(recorded.text), len(text)) if index is None else index
        return Departure("text", at, recorded.text[at : at + 20], text[at : at + 20])
    finish = "stop" if recorded.finish in _LIKE_STOP else recorded.finish
    if finish is not None and finish != now.finish:
        return Departure("finish", len(now.token_ids or ()), recorded.finish, now.finish)
    return None


def measured(answer: int, found: Departure, drafted: Drafted, params: SamplingParams, result: Result) -> Departure:
    """``found`` with its score gap, after the second run. ``answer``: which of those that ``drafted`` was made of."""
    return replace(found, gap=drafted.gap(answer, found, params, Noise(result.seed, result.sample)))
