"""What routes share: bodies, read in bounds and validated off the event loop; and the one way from a request to its
answer, streamed or whole, which an ``Encoder`` writes as its protocol has it."""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outpace.engine.aio import Watch
from outpace.errors import OutpaceError
from outpace.server import errors
from outpace.server.engines.generation import Caller, Generation, Part, Whole, Work
from outpace.server.engines.models import Served
from outpace.server.engines.service import Service
from outpace.server.errors import APIError
from outpace.server.schema import Answer, M, Unknown, parsed

log = logging.getLogger(__name__)

# -- bodies -----------------------------------------------------------------------------------------------------------
# Bodies of requests: read within bounds of size, time and memory, and counted before anything is built of them.

SMALL = 64 << 10  # bytes, beyond which a body needs a place
MOVES = 2.0  # seconds in which so many bytes must come, where others wait for a place
GONE = 499  # nginx's for a client that went away; nobody reads it
MOST_MEMBERS = 1024  # of a gzip
_PIECE = 1 << 20  # bytes that are counted at a time


async def read(request: Request, service: Service, held: ExitStack) -> bytes:
    """The body. A large one has a place, shared by API key, until ``held`` closes; one that does not move loses it to
    whoever waits. Raises APIError: 413 beyond ``max_body`` bytes, 408 when it takes too long, 415 when it is no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind in _UNSAID and _is_ollamas(request)):
        raise APIError(415, f"the content type is {kind!r}: send application/json", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "")
    codings = [coding for each in encoding.lower().split(",") if (coding := each.strip()) not in ("", "identity")]
    if codings and codings not in _GZIP:
        raise APIError(415, f"the content encoding is {encoding!r}: send gzip or none", code="unsupported_media_type")
    most = service.settings.max_body
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    pieces, size, looking = list[bytes](), 0, None

    async def look() -> None:
        """From when the body has its place: end the wait for one that does not move while others wait."""
        while True:
            seen = size
            await asyncio.sleep(MOVES)
            if service.large.wanted and size - seen < SMALL:
                limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(service.settings.body_timeout) as limit:
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise _too_large(most)
                if (size > SMALL or codings) and looking is None:
                    held.callback(await service.large.take())
                    looking = asyncio.create_task(look())
                pieces.append(piece)
    except TimeoutError:
        raise APIError(408, "the body took too long to arrive: send it again") from None
    except ClientDisconnect:
        raise APIError(GONE, "the client went away") from None
    finally:
        if looking is not None:
            looking.cancel()
    body = b"".join(pieces)
    return await service.work(_inflated, body, most) if codings else body


def _inflated(body: bytes, most: int) -> bytes:
    """Raises APIError: 413 for more than ``most`` bytes, 400 for what is not gzip's."""
    if body.count(b"\x1f\x8b\x08") > MOST_MEMBERS:
        raise APIError(400, f"the body is gzipped in more than {MOST_MEMBERS} members: send it in one")
    try:
        found = gzip.GzipFile(fileobj=io.BytesIO(body)).read(most + 1)  # of all members
    except EOFError as error:
        raise APIError(400, "the body ends before its gzip does: send all of it") from error
    except (OSError, zlib.error) as error:
        raise APIError(400, f"the body cannot be unzipped ({error}): send it as it is") from error
    if len(found) > most:
        raise _too_large(most)
    if not found:
        raise APIError(400, "the body unzipped is empty: send JSON")
    return found


def _too_large(most: int) -> APIError:
    return APIError(413, f"the body has more than {most} bytes: send less", code="request_too_large")


_GZIP = (["gzip"], ["x-gzip"])
_UNSAID = ("", "application/x-www-form-urlencoded")  # what clients send who name no type: curl has the second


def _is_ollamas(request: Request) -> bool:
    """Whether a client of Ollama asks, and no page: a browser says from where."""
    names = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode")
    return request.url.path.startswith("/api/") and not any(name in request.headers for name in names)


def understood(kind: type[M], body: bytes, most: int, unknown: Unknown | None = None) -> M:
    """``body`` as a ``kind``. ``unknown``: what becomes of fields that are not known. Raises APIError: 413 for more
    than ``most`` values, 400 for what is no such request."""
    check_values(body, most * kind.bulk)
    return parsed(kind, body, unknown)


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
                data = await read(request, service, held)
                body = await service.work(understood, kind, data, most, service.unknown)
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


# -- answers ----------------------------------------------------------------------------------------------------------

_MANY = 128  # tokens and parts, of which a stream's next are written off the event loop
_LOOK = 0.5  # seconds after which the reading of a prompt is looked at again
FINGERPRINT = "system-fingerprint"  # a header of streams: a resumed one may not have it otherwise
DONE = b"data: [DONE]\n\n"


class Encoder(ABC):
    """An answer as a protocol writes it: part by part as it comes, or all of it at once.

    ``prefix``: of the answer's id; ``names``: of fields of chats and completions, as the protocol spells them;
    ``media_type``: of streams; ``alive``: what a stream has while there is nothing to write. ``end`` and ``whole`` run
    off the event loop, and ``part`` where there is much to write.
    """

    prefix: ClassVar[str]
    names: ClassVar[errors.Names] = {}
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    alive: ClassVar[bytes] = b": still working\n\n"

    def __init__(self, generation: Generation, body: Any) -> None:
        self.generation, self.body = generation, body
        self._choices: dict[int, Whole] = {}

    def fold(self, part: Part) -> None:
        """Put a part to what its choice has so far."""
        self._choices.setdefault(part.index, Whole(part.index)).add(part)

    @property
    def folded(self) -> list[Whole]:
        """The choices, of the parts that were folded, by index."""
        return [self._choices[index] for index in sorted(self._choices)]

    @property
    def only(self) -> Whole:
        """The choice, of protocols that have one."""
        return self._choices.setdefault(0, Whole(0))

    @abstractmethod
    def whole(self) -> Answer | Response:
        """The answer, once every part is folded."""

    def begin(self) -> bytes:
        """The stream's beginning, before any part."""
        return b""

    @abstractmethod
    def part(self, part: Part) -> bytes:
        """What a part adds to the stream."""

    @property
    def shows_progress(self) -> bool:
        """Whether the stream says how much of the prompt was read."""
        return False

    def progress(self) -> bytes:
        """That."""
        return b""

    @abstractmethod
    def end(self) -> bytes:
        """The stream's end, after every part."""

    def failed(self, error: APIError) -> bytes:
        """The stream's end, where ``error`` ended the generation."""
        return event(error.body.model_dump_json().encode()) + DONE


def event(data: bytes, name: str | None = None) -> bytes:
    """A server-sent event with ``data``, JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, data)


async def answered(
    request: Request,
    body: Any,
    kind: type[Encoder],
    work: Callable[[Served, str], Work],
    *,
    model: str | None,
    streamed: bool,
) -> Answer | Response:
    """The answer to ``body`` as a ``kind`` of encoder writes it. ``work``: what an engine is asked, of the model and
    the caller's scope. Raises APIError or OutpaceError."""
    try:
        generation = await begun(request, model, kind.prefix, work)
    except (APIError, OutpaceError) as error:
        if not kind.names:
            raise
        raise errors.of(error, kind.names) from error
    encoder = kind(generation, body)
    if streamed:
        return EventStream(encoder, service_of(request))
    await each_part(request, generation, encoder.fold)
    return await service_of(request).work(encoder.whole)


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
    task, leaving = asyncio.ensure_future(waiting), asyncio.ensure_future(_gone(request.receive))
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


async def _gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what ``encoder`` writes of its generation's parts as they come, with signs of life, and an error that ends
    them. Then, and when the client goes away or takes too long to read, the generation is closed."""

    def __init__(self, encoder: Encoder, service: Service) -> None:
        bits = encoder.generation.model.fingerprint
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", FINGERPRINT: bits})
        self.raw_headers = [
            (b"content-type", encoder.media_type.encode()),
            *((name, value) for name, value in self.raw_headers if name != b"content-length"),
        ]
        self._encoder, self._service, self._begins = encoder, service, True

    async def _events(self) -> AsyncGenerator[bytes]:
        encoder, generation = self._encoder, self._encoder.generation
        if first := encoder.begin():
            yield first
        reading, seconds, alive, read = encoder.shows_progress, 0.0, self._service.settings.keep_alive, -1
        while generation.left:
            patience = min(_LOOK, alive) if reading else alive
            parts = await generation.parts(patience)
            if reading and (parts or generation.progress.processed > read):
                read = generation.progress.processed
                yield encoder.progress()
            reading = reading and not parts
            seconds = 0.0 if parts else seconds + patience
            if data := await self._written(parts) if parts else encoder.alive if seconds >= alive else b"":
                seconds = 0.0
                yield data
        yield await self._service.work(encoder.end)

    async def _written(self, parts: Sequence[Part]) -> bytes:
        """What they add: a prompt's log-probabilities may take a second, and so may finding out where an answer that
        goes on stood."""
        encoder, generation = self._encoder, self._encoder.generation
        size = sum(1 + len(part.token_ids) + len(part.prompt_logprobs) for part in parts)
        resumed = self._begins and bool(generation.resumed)
        self._begins = False
        if resumed or size > _MANY:
            return await self._service.work(lambda: b"".join(map(encoder.part, parts)))
        return b"".join(map(encoder.part, parts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._events()
        try:
            patience = Watch(self._service.settings.write_timeout, lambda: writing.cancel())
            writing = asyncio.ensure_future(self._write(events, send, patience))
            leaving = asyncio.ensure_future(_gone(receive))
            try:
                await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                patience.close()
                for task in (writing, leaving):
                    task.cancel()
                done = await asyncio.gather(writing, leaving, return_exceptions=True)
        finally:
            await events.aclose()
            await self._encoder.generation.aclose()
        if isinstance(done[0], Exception) and not isinstance(done[0], OSError):
            raise done[0]

    async def _write(self, events: AsyncGenerator[bytes], send: Send, patience: Watch) -> None:
        async def sent(data: bytes) -> None:
            patience.begin()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            patience.end()

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in events:
                await sent(data)
        except OSError:
            raise
        except Exception as error:
            refused = errors.of(error)
            if refused is not error and refused.status >= 500:
                log.exception("a stream failed")
            await sent(self._encoder.failed(refused))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
