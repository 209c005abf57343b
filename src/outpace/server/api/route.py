"""What routes share: bodies read in bounds, and validated and answered off the event loop; waiting for an answer unless
the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar, get_type_hints

import numpy as np
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from outpace.server.engines.generation import Caller, Generation, Part, Whole, Work
from outpace.server.engines.models import Served
from outpace.server.engines.service import Service
from outpace.server.errors import APIError
from outpace.server.schema import Answer, M, parsed
from outpace.server.streaming import EVENTS, EventStream, Format, gone

# -- bodies -----------------------------------------------------------------------------------------------------------
# Bodies of requests: read within bounds of size, time and memory, and counted before anything is built of them.

SMALL = 64 << 10  # bytes, beyond which a body needs a place
GONE = 499  # nginx's for a client that went away; nobody reads it
_PIECE = 1 << 20  # bytes that are counted at a time


async def read(request: Request, service: Service, held: ExitStack) -> bytes:
    """The body. A large one has a place, shared by API key, until ``held`` closes. Raises APIError: 413 beyond
    ``max_body`` bytes, 408 when it takes too long, 415 when it is no JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, f"the content type is {kind!r}: send application/json", code="unsupported_media_type")
    most = service.settings.max_body
    too_large = APIError(413, f"the body has more than {most} bytes: send less", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    pieces, size, placed = [], 0, False
    try:
        async with asyncio.timeout(service.settings.body_timeout):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise too_large
                if size > SMALL and not placed:
                    placed = True
                    held.callback(await service.large.take())
                pieces.append(piece)
    except TimeoutError:
        raise APIError(408, "the body took too long to arrive: send it again") from None
    except ClientDisconnect:
        raise APIError(GONE, "the client went away") from None
    return b"".join(pieces)


def understood(kind: type[M], body: bytes, most: int) -> M:
    """``body`` as a ``kind``. Raises APIError: 413 for more than ``most`` values, 400 for what is no such request."""
    check_values(body, most * kind.bulk)
    return parsed(kind, body)


def check_values(body: bytes, most: int) -> None:
    """Raise APIError (413) for JSON of more than ``most`` values, of which strings and names may be a quarter, lists
    and objects a sixteenth: a byte of JSON may take 100 of memory, and time that nobody else has meanwhile."""
    bounds = np.array([most, most // 4, most // 16])
    lists = body.count(b"[") + body.count(b"{")
    if (np.array([lists + body.count(b","), body.count(b'"') // 2, lists]) <= bounds).all():
        return
    text = body.replace(rb"\\", b"  ").replace(rb"\"", b"  ")  # so that every quote begins or ends a string
    found, inside = np.zeros(3, np.int64), 0
    for start in range(0, len(text), _PIECE):
        piece = np.frombuffer(text[start : start + _PIECE], np.uint8)
        quotes = piece == ord('"')
        within = (np.cumsum(quotes, dtype=np.uint8) + inside) & 1
        outside, inside = within == 0, int(within[-1])
        begun = np.count_nonzero(outside & ((piece | 0x20) == ord("{")))  # or [
        commas = np.count_nonzero(outside & (piece == ord(",")))
        found += np.array([begun + commas, np.count_nonzero(quotes & (within == 1)), begun])
        if (found > bounds).any():
            what = f"more than {bounds[0]} values, {bounds[1]} strings or {bounds[2]} lists and objects"
            raise APIError(413, f"the body has {what}: send less", code="request_too_large")


T = TypeVar("T")

STREAMED: dict[int | str, dict[str, Any]] = {  # ``responses`` of a route whose answer may be a stream
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


class Route(APIRoute):
    """A route whose endpoint is ``endpoint(request, body: a Body) -> Answer | Response``, with neither path nor query.

    FastAPI describes it. The body is read in bounds first; validating it and writing the answer, which may be large,
    happens in the service's threads, where FastAPI would do both in the event loop.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, kind = self.endpoint, get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            service = service_of(request)
            with ExitStack() as held:
                request.scope["outpace.body"] = held
                most = service.settings.max_values
                body = await service.work(understood, kind, await read(request, service, held), most)
                answer: Answer | Response = await endpoint(request, body)
            if isinstance(answer, Response):
                return answer
            return Response(await service.work(answer.to_json), media_type="application/json")

        return handle


def service_of(request: Request) -> Service:
    """The app's."""
    service: Service = request.app.state.service
    return service


def scope_of(request: Request) -> str:
    """Whose request this is."""
    scope: str = request.scope.get("outpace.scope", "")
    return scope


async def begun(request: Request, model: str | None, kind: str, work: Callable[[Served, str], Work]) -> Generation:
    """A generation of what ``work`` makes of the model and the caller's scope. ``kind``: prefix of the answer's id.

    Raises APIError or OutpaceError.
    """
    service, scope = service_of(request), scope_of(request)
    caller = Caller(kind, request.scope.get("outpace.request_id", ""), scope)
    beginning = service.begin(model, lambda served: work(served, scope), caller)
    generation = await _unless_gone(request, beginning, Generation.aclose)
    if held := request.scope.get("outpace.body"):
        held.close()  # what was sent is prepared
    return generation


async def whole(request: Request, generation: Generation) -> list[Whole]:
    """Every choice, whole, in order; the generation is closed. Raises APIError."""
    wholes: dict[int, Whole] = {}

    def add(part: Part) -> None:
        wholes.setdefault(part.index, Whole(part.index)).add(part)

    await each_part(request, generation, add)
    return [wholes[index] for index in sorted(wholes)]


async def each_part(request: Request, generation: Generation, take: Callable[[Part], object]) -> None:
    """Give every part to ``take``; then the generation is closed. Raises APIError."""

    async def all_parts() -> None:
        while generation.left:
            for part in await generation.parts():
                take(part)

    async with aclosing(generation):
        try:
            await _unless_gone(request, all_parts())
        except APIError as error:
            error.observed = True
            raise


async def _unless_gone(
    request: Request, waiting: Awaitable[T], dispose: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """What ``waiting`` gives; when the client goes away first, it is cancelled, which raises APIError. ``dispose`` gets
    a result that came too late."""
    task, leaving = asyncio.ensure_future(waiting), asyncio.ensure_future(gone(request.receive))
    taken, gone_error = False, APIError(GONE, "the client went away")
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            taken = True
            return task.result()
    finally:
        for future in (task, leaving):
            future.cancel()
        found = (await asyncio.gather(task, leaving, return_exceptions=True))[0]
        if dispose is not None and not taken and not isinstance(found, BaseException):
            gone_error.observed = True
            await dispose(found)
    raise gone_error


def stream(
    request: Request,
    generation: Generation,
    written: Callable[[list[Part]], bytes],
    last: Callable[[], Awaitable[bytes]],
    *,
    first: bytes = b"",
    failed: Callable[[APIError], bytes] | None = None,
    form: Format = EVENTS,
) -> EventStream:
    """A stream of ``first``, of what ``written`` makes of parts as they come, and of ``last``; it closes the
    generation. ``failed``: the event of an error, where it is not that of chats."""
    settings = service_of(request).settings

    async def events() -> AsyncGenerator[bytes]:
        if first:
            yield first
        while generation.left:
            parts = await generation.parts(settings.keep_alive)
            if data := written(parts) if parts else form.alive:
                yield data
        yield await last()

    bits = generation.model.fingerprint
    return EventStream(events(), generation.aclose, settings.write_timeout, failed, form.media_type, bits)
