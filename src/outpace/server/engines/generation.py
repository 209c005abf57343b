"""A request that runs: what it asks of an engine, its parts as they come, and what it holds of the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from outpace.common.arrays import I32
from outpace.engine.aio import Running
from outpace.engine.results import Result
from outpace.exact.noise import fresh_seed
from outpace.params import SamplingParams
from outpace.server import errors
from outpace.server.conversation.pieces import OutputParser, Plain
from outpace.server.engines.models import Served
from outpace.server.engines.parts import Choice, Part
from outpace.server.errors import APIError

_EXACT = 2**53  # whole numbers below it survive JSON anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an engine is asked: every prompt (token ids int32 [P]) with the same parameters.

    ``options``: of ``Engine.prepare``; ``parser``: of a choice's text, by the choice's index; ``trace``: the answer
    says who wrote it; ``nothing``: only the prompts' log-probabilities are asked for; ``texts``: the prompts, where the
    answer repeats them.
    """

    prompts: list[I32]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    parser: Callable[[int], OutputParser] | None = None
    trace: bool = False
    nothing: bool = False
    texts: list[str] = field(default_factory=list)
    user: str | None = None

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n


def seeded(params: SamplingParams) -> SamplingParams:
    """``params`` with a seed: their own, or a fresh one that the answer reports."""
    return params if params.seed is not None else params.with_(seed=fresh_seed() % _EXACT)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked, and what for. ``kind``: what the answer's id begins with; ``scope``: whose KV may be shared."""

    kind: str
    request_id: str
    scope: str = ""


class Observer:
    """Base of metrics, logs and spans; by itself it does nothing. Called in the event loop: no method may take long."""

    def began(self, generation: Generation) -> None:
        """The request was queued."""

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        """Parts of the answer have come."""

    def ended(self, generation: Generation, error: APIError | None) -> None:
        """The request is over: with ``error``; or all choices have ended; or, neither, the client went away."""

    def refused(self, error: APIError) -> None:
        """A request was answered with an error that ended no generation."""


class Generation:
    """The caller closes it. ``results``: of the choices that have ended, by index."""

    def __init__(
        self, model: Served, work: Work, running: Running, caller: Caller, observers: Sequence[Observer]
    ) -> None:
        self.model, self.work, self.request_id, self.user = model, work, caller.request_id, work.user
        self._running, self._observers = running, observers
        self.held = AsyncExitStack()  # what it has of the server, given back when it closes
        self.id = f"{caller.kind}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.began = time.perf_counter()
        self.first_token_at: float | None = None  # by the same clock
        self._choices = {
            (request, sample): self._choice(i * work.params.n + sample)
            for i, request in enumerate(running.ids)
            for sample in range(work.params.n)
        }
        self.results: dict[int, Result] = {}
        self._abort: APIError | None = None
        self._error: APIError | None = None
        self._closed = False

    def _choice(self, index: int) -> Choice:
        work = self.work
        parser = Plain() if work.parser is None else work.parser(index)
        colours = self.model.colours(work.params.skip_special_tokens) if work.trace else None
        return Choice(index, parser, colours, work.nothing)

    @property
    def left(self) -> int:
        """Choices that have not ended."""
        return self._running.left

    @property
    def in_order(self) -> list[Result]:
        """The results there are, by choice."""
        return [self.results[index] for index in sorted(self.results)]

    async def parts(self, timeout: float | None = None) -> list[Part]:
        """What has come; none when ``timeout`` seconds brought nothing. Raises APIError when a choice failed."""
        try:
            return await self._parts(timeout)
        except Exception as error:
            self._error = errors.of(error)
            self._error.observed = True
            raise self._error from error

    async def _parts(self, timeout: float | None) -> list[Part]:
        deltas = await self._running.get(timeout)
        if self._abort is not None:
            raise self._abort
        parts = []
        for delta in deltas:
            part = self._choices[delta.request, delta.sample].feed(delta)
            parts.append(part)
            if (result := part.result) is not None:
                if result.finish_reason in ("error", "cancelled"):
                    raise _failure(result)
                self.model.admission.took(result.stats.total_seconds)
                self.results[part.index] = result
        if self.first_token_at is None and any(part.token_ids for part in parts):
            self.first_token_at = time.perf_counter()
        if parts:
            for observer in self._observers:
                observer.gained(self, parts)
        return parts

    def abort(self, error: APIError) -> None:
        """Let whoever reads it get ``error`` next."""
        self._abort = error
        self._running.wake()

    async def aclose(self) -> None:
        """Free its rows before the engine's next step. Calling twice is allowed."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.held.aclose()
        finally:
            for observer in self._observers:
                observer.ended(self, self._error)


def _failure(result: Result) -> APIError:
    if result.cause is not None and (told := errors.of(result.cause)).status < 500:
        return told
    return APIError(500, result.error or "the request was cancelled", code="generation_failed")
