"""What callers get back: deltas as a request gains tokens, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from outpace.engine.statistics import Stats
from outpace.errors import OutpaceError
from outpace.exact.sampling import TokenLogprob
from outpace.params import Acceptance

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
TARGET = "target"  # the source of recovered and bonus tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request gained since its last delta. The last one has a ``finish_reason`` and the ``result``."""

    request: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]  # who wrote each token: a drafter's name, or "target"
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # where they were asked for, with the first tokens
    drafted: int = 0  # draft tokens verified since the last delta
    finish_reason: FinishReason | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sample of one request."""

    request: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    drafter: str
    acceptance: Acceptance
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # of the prompt's tokens; the first has none
    stopped_by: str | int | None = None  # the stop string or token id
    error: str | None = None
    cause: OutpaceError | None = field(default=None, repr=False, compare=False)  # the error, where one was raised
    notes: tuple[str, ...] = ()  # what was turned off or lossy, and why

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)
