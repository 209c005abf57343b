"""A request that runs: its parts as they come, and all that it holds of the server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from outpace.engine.aio import Running
from outpace.engine.results import Result
from outpace.server import errors
from outpace.server.errors import APIError
from outpace.server.events import Choice, Part
from outpace.server.served import Served
from outpace.server.tools.base import Plain
from outpace.server.translate import Work


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked, and what for. ``kind``: what the answer's id begins with; ``scope``: whose KV may be shared."""

    kind: str
    request_id: str
    scope: str = ""


class Observer(Protocol):
    """Whoever counts what the server does: the seam of metrics and logs. Called in the event loop, so nothing here may
    take long."""

    def began(self, generation: Generation) -> None:
        """It was queued."""

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        """Parts of it have come."""

    def ended(self, generation: Generation, error: APIError | None) -> None:
        """It is over: with ``error``; or its choices have all ended; or, neither, the client went away."""

    def refused(self, error: APIError) -> None:
        """A request was answered with an error that is no generation's."""

    async def exposition(self, service: Any) -> tuple[bytes, str]:
        """What ``/metrics`` answers, and its content type."""


class Generation:
    """Whoever has it closes it. ``results``: of the choices that have ended, by index."""

    def __init__(self, model: Served, work: Work, running: Running, caller: Caller, observer: Observer | None) -> None:
        self.model, self.work, self.request_id, self.user = model, work, caller.request_id, work.user
        self._running, self._observer = running, observer
        self.held = AsyncExitStack()  # what it has of the server, given back when it closes
        self.id = f"{caller.kind}{uuid.uuid4().hex}"
        self.created = int(time.time())
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
        if parts and self._observer is not None:
            self._observer.gained(self, parts)
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
            if self._observer is not None:
                self._observer.ended(self, self._error)


def _failure(result: Result) -> APIError:
    if result.cause is not None and (told := errors.of(result.cause)).status < 500:
        return told
    return APIError(500, result.error or "the request was cancelled", code="generation_failed")
