"""What routes that answer share: reading a body in bounds, waiting for an answer unless the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outpace.server.errors import APIError
from outpace.server.events import Part, Whole
from outpace.server.generation import Caller, Generation
from outpace.server.schema.common import M, parsed
from outpace.server.served import Served
from outpace.server.service import Service
from outpace.server.streaming import ALIVE, EventStream, gone
from outpace.server.translate import Work

T = TypeVar("T")

_GONE = 499  # nginx's for a client that went away; nobody reads it


def service_of(request: Request) -> Service:
    """The app's."""
    service: Service = request.app.state.service
    return service


def scope_of(request: Request) -> str:
    """Whose request this is."""
    scope: str = request.scope.get("outpace.scope", "")
    return scope


async def asked(request: Request, kind: type[M]) -> M:
    """The body as a ``kind``. Raises APIError."""
    service = service_of(request)
    return await service.work(parsed, kind, await _body(request, service))


async def _body(request: Request, service: Service) -> bytes:
    """Raises APIError: 413 beyond ``max_body`` bytes, 408 when it takes too long, 415 when it is no JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, f"the content type is {kind!r}: send application/json", code="unsupported_media_type")
    most = service.settings.max_body
    too_large = APIError(413, f"the body has more than {most} bytes: send less", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    pieces, size = [], 0
    try:
        async with asyncio.timeout(service.settings.body_timeout):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise too_large
                pieces.append(piece)
    except TimeoutError:
        raise APIError(408, "the body took too long to arrive: send it again") from None
    except ClientDisconnect:
        raise APIError(_GONE, "the client went away") from None
    return b"".join(pieces)


async def begun(request: Request, model: str | None, kind: str, translate: Callable[[Served, str], Work]) -> Generation:
    """A generation of what ``translate`` makes of the model and the caller's scope. Raises APIError or OutpaceError."""
    service, scope = service_of(request), scope_of(request)
    caller = Caller(kind, request.scope.get("outpace.request_id", ""), scope)
    beginning = service.begin(model, lambda its: translate(its, scope), caller)
    return await _unless_gone(request, beginning, Generation.aclose)


async def whole(request: Request, generation: Generation) -> list[Whole]:
    """Every choice, whole, in order; the generation is closed. Raises APIError."""
    wholes: dict[int, Whole] = {}

    def add(part: Part) -> None:
        wholes.setdefault(part.index, Whole(part.index)).add(part)

    await each_part(request, generation, add)
    return [wholes[index] for index in sorted(wholes)]


async def each_part(request: Request, generation: Generation, take: Callable[[Part], None]) -> None:
    """Give every part to ``take``; then the generation is closed. Raises APIError."""

    async def all_of() -> None:
        while generation.left:
            for part in await generation.parts():
                take(part)

    async with aclosing(generation):
        await _unless_gone(request, all_of())


async def _unless_gone(
    request: Request, waiting: Awaitable[T], dispose: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """What ``waiting`` gives; when the client goes away first, it is cancelled, which raises APIError. ``dispose`` gets
    what nobody takes any more."""
    task, leaving = asyncio.ensure_future(waiting), asyncio.ensure_future(gone(request.receive))
    taken = False
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            taken = True
            return task.result()
    finally:
        for its in (task, leaving):
            its.cancel()
        found = (await asyncio.gather(task, leaving, return_exceptions=True))[0]
        if dispose is not None and not taken and not isinstance(found, BaseException):
            await dispose(found)
    raise APIError(_GONE, "the client went away")


def stream(
    request: Request,
    generation: Generation,
    told: Callable[[list[Part]], list[bytes]],
    last: Callable[[], list[bytes]],
) -> EventStream:
    """A stream of what ``told`` makes of parts as they come, then ``last``. It closes the generation."""
    settings = service_of(request).settings

    async def events() -> AsyncGenerator[bytes]:
        while generation.left:
            parts = await generation.parts(settings.keep_alive)
            if not parts:
                yield ALIVE
            elif data := b"".join(told(parts)):
                yield data
        yield b"".join(last())

    return EventStream(events(), generation.aclose, settings.write_timeout)


async def answer(request: Request, value: Callable[[], Any]) -> Response:
    """What ``value`` gives, as JSON; made and written off the event loop."""

    def written() -> bytes:
        return json.dumps(value(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    return Response(await service_of(request).work(written), media_type="application/json")
