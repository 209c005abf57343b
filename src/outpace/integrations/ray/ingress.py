"""The ingress: passes requests to leased servers, and to another when one is lost."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any, TypeVar

import aiohttp
import ray
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

from outpace.integrations.ray.delivered import RESUMABLE, Delivered, LostError
from outpace.integrations.ray.replica import PATIENCE, Lease, alive
from outpace.integrations.ray.routing import beginnings
from outpace.server.api.route import FINGERPRINT
from outpace.server.auth import routed
from outpace.server.errors import APIError, written

T = TypeVar("T")

SILENCE = 1.0  # seconds without a byte, after which a server is asked whether it lives
WAIT = 60.0  # seconds that a request waits for a replica
AVOIDS = 15.0  # seconds of them in which it is given none that it has lost
LOSSES = 8  # servers that one request may lose
_OWN = {"connection", "content-length", "transfer-encoding", "keep-alive", "date", "server"}  # headers of a connection
_STREAMED = ("text/event-stream", "application/x-ndjson")
_LOST = (aiohttp.ClientError, OSError, TimeoutError, LostError)

log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Asked:
    """A request. ``model``: that it names, None where its answer has no fingerprint; ``delivered``: of one whose stream
    another server can go on with."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    data: bytes
    begins: list[str] = field(default_factory=list)
    model: str | None = None
    delivered: Delivered | None = None

    def body(self) -> bytes:
        return self.data if self.delivered is None else json.dumps(self.delivered.request()).encode()

    def failed(self, message: str, kind: str) -> bytes:
        """The error ``replica_lost``, as an answer of this content type has it; "": as the whole answer."""
        data = written(APIError(503, message, code="replica_lost"), self.path)
        if kind.startswith("text/event-stream"):
            if self.path.startswith("/v1/messages"):
                return b"event: error\ndata: %s\n\n" % data
            return b"data: %s\n\ndata: [DONE]\n\n" % data
        return data + b"\n" if kind else data


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: list[tuple[str, str]]

    @property
    def kind(self) -> str:
        """The content type."""
        return next((value for name, value in self.headers if name.lower() == "content-type"), "")

    def apply(self, response: Response) -> Response:
        response.status_code = self.status
        response.raw_headers += [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in self.headers
            if name.lower() not in _OWN
        ]
        return response


class Ingress:
    """``replicas``: of Replica. ``max_body``: bytes of a request that are read."""

    def __init__(self, replicas: DeploymentHandle, max_body: int) -> None:
        self._replicas, self._max_body = replicas, max_body
        self._session: aiohttp.ClientSession | None = None
        self._fingerprints: dict[str, str] = {}  # by update and model: of the first stream
        self._doubted: dict[str, asyncio.Task[None]] = {}  # replicas that requests have lost: new ones avoid them

    async def __call__(self, request: Request) -> Response:
        asked = await self._asked(request)
        if request.url.path == "/metrics":
            return await self._metrics(asked)
        parts = self._parts(asked)
        head = await anext(parts)
        assert isinstance(head, Head)
        if head.kind.startswith(_STREAMED):
            return head.apply(StreamingResponse(_body(parts)))
        return head.apply(Response(b"".join([part async for part in _body(parts)])))

    async def _asked(self, request: Request) -> Asked:
        data = b""
        async for piece in request.stream():
            data += piece
            if len(data) > self._max_body:  # enough for the server to refuse it
                break
        path = route = routed(request.scope["raw_path"].decode("latin-1"))
        if query := request.scope["query_string"].decode("latin-1"):
            path += f"?{query}"
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _OWN]
        asked = Asked(request.method, path, headers, data)
        try:
            body = json.loads(data) if data else None
        except (ValueError, RecursionError):
            return asked
        asked.begins = beginnings(body)
        if isinstance(body, dict) and route in RESUMABLE:
            asked.model = str(body.get("model"))
            if body.get("seed") is None:
                body["seed"] = SystemRandom().getrandbits(53)
            if body.get("stream") is True:
                asked.delivered = RESUMABLE[route](body)
            else:
                asked.data = json.dumps(body).encode()
        return asked

    async def _parts(self, asked: Asked) -> AsyncGenerator[Head | bytes]:
        """The head of the answer, then its bytes, from as many servers as it takes."""
        lost: list[str] = []
        begun, why = "", "no replica is free"
        while len(lost) < LOSSES:
            try:
                async with self._leased(asked, lost) as lease:
                    try:
                        async with aclosing(self._from(lease, asked)) as parts:
                            async for part in parts:
                                if not isinstance(part, Head):
                                    yield part
                                elif not begun:
                                    begun = part.kind
                                    yield part
                                elif part.status != 200:
                                    if part.status not in (429, 503):  # others would refuse, too
                                        asked.delivered = None
                                    raise LostError(f"another server refused to go on ({part.status})")
                        return
                    except _LOST as error:
                        why = f"{type(error).__name__}: {error}"
                        log.warning("replica %s lost a request: %s", lease.replica, why)
                        lost.append(lease.replica)
                        self._doubt(lease)
                        if begun and asked.delivered is None:
                            break
            except TimeoutError:
                break
        if not begun:
            yield Head(503, [("content-type", "application/json")])
        yield asked.failed(f"the replica was lost ({why}): ask again", begun)

    def _doubt(self, lease: Lease) -> None:
        """Avoid a replica until its server says that it lives, for ``WAIT`` seconds at most: Ray may ask one behind a
        cut network for longer than a request waits."""

        async def until_it_lives() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT):
                    while True:
                        try:
                            return await alive(lease.url)
                        except _LOST:
                            await asyncio.sleep(SILENCE)

        if lease.replica not in self._doubted:
            self._doubted[lease.replica] = task = asyncio.create_task(until_it_lives())
            task.add_done_callback(lambda _: self._doubted.pop(lease.replica))

    @asynccontextmanager
    async def _leased(self, asked: Asked, avoid: list[str]) -> AsyncIterator[Lease]:
        """A place at a server. Raises TimeoutError."""
        async with asyncio.timeout(WAIT):
            began = asyncio.get_running_loop().time()
            while True:
                waited = asyncio.get_running_loop().time() - began
                avoided = [*(avoid if waited < AVOIDS else ()), *(self._doubted if waited < 2 * AVOIDS else ())]
                calls = self._replicas.options(stream=True).lease.remote(asked.begins, avoided)
                try:
                    lease = await asyncio.wait_for(anext(calls), PATIENCE if self._doubted else AVOIDS)
                    break
                except TimeoutError:  # whom it lost may live again; who was chosen may be cut off
                    calls.cancel()
                except ray.exceptions.RayError:
                    await asyncio.sleep(0.1)
                except BaseException:
                    calls.cancel()
                    raise
        try:
            yield lease
        finally:
            calls.cancel()

    async def _from(self, lease: Lease, asked: Asked) -> AsyncGenerator[Head | bytes]:
        """What one server answers. Raises one of ``_LOST``, in time also for a server that is stopped."""
        if self._session is None:
            bounds = aiohttp.ClientTimeout(total=None, sock_connect=3)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=bounds, connector=connector, auto_decompress=False)
        url = URL(lease.url + asked.path, encoded=True)
        asking = self._session.request(asked.method, url, data=asked.body(), headers=asked.headers)
        answer = await _patiently(asking, lease)
        async with answer:
            head = Head(answer.status, [*answer.headers.items()])
            if not answer.content_type.startswith(_STREAMED):
                whole = await _patiently(answer.read(), lease)
                if answer.status == 503 and b'"shutting_down"' in whole:
                    raise LostError("the server is shutting down")
                if answer.status == 200 and asked.model is not None:
                    self._check(json.loads(whole)["system_fingerprint"], asked, lease)
                yield head
                yield whole
                return
            if asked.model is not None:
                self._check(answer.headers[FINGERPRINT], asked, lease)
            yield head
            rest = b""
            while piece := await _patiently(answer.content.readany(), lease):
                if asked.delivered is None:
                    yield piece
                    continue
                *events, rest = (rest + piece).split(b"\n\n")
                taken, lost = b"", None
                for event in events:
                    try:
                        taken += asked.delivered.take(event + b"\n\n")
                    except LostError as error:  # what came before it counts as delivered
                        lost = error
                        break
                if taken:
                    yield taken
                if lost is not None:
                    raise lost
            if asked.delivered is not None and not asked.delivered.whole:
                raise LostError("the stream ended early")

    def _check(self, bits: str, asked: Asked, lease: Lease) -> None:
        """Raise LostError if the server's fingerprint is not that of those before it, of this update or answer."""
        first = self._fingerprints.setdefault(f"{lease.update} {asked.model}", bits)
        if asked.delivered is not None:
            asked.delivered.fingerprint = first = asked.delivered.fingerprint or first
        if bits != first:
            raise LostError(f"this server has {bits}, those before it had {first}")

    async def _metrics(self, asked: Asked) -> Response:
        """Prometheus's text, with samples of all replicas summed."""
        sums: dict[str, float] = defaultdict(float)
        lines: dict[str, None] = {}
        for url in await self._replicas.broadcast("where").results_async():
            try:
                parts = self._from(Lease("", url, ""), asked)
                head = await anext(parts)
                text = b"".join([part async for part in _body(parts)]).decode()
            except _LOST:
                continue  # one that has just died counts nothing
            assert isinstance(head, Head)
            if head.status != 200:
                return head.apply(Response(text))
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                key = line if line.startswith("#") or not name else name
                lines[key] = None
                if key == name:
                    sums[key] += float(value)
        total = "".join(f"{key} {sums[key]!r}\n" if key in sums else f"{key}\n" for key in lines)
        return Response(total, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


async def _body(parts: AsyncGenerator[Head | bytes]) -> AsyncGenerator[bytes]:
    """What follows the head."""
    async with aclosing(parts):
        async for part in parts:
            assert isinstance(part, bytes)
            yield part


async def _patiently(waiting: Coroutine[Any, Any, T], lease: Lease) -> T:
    """What ``waiting`` gives, as long as the server says that it lives. Raises one of ``_LOST``."""
    task = asyncio.ensure_future(waiting)
    try:
        while not (await asyncio.wait({task}, timeout=SILENCE))[0]:
            await alive(lease.url)
        return task.result()
    finally:
        task.cancel()
