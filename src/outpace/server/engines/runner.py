"""uvicorn around the app: on a signal, what runs may end first."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from outpace.errors import Argument, ParameterError
from outpace.server.app import create_app
from outpace.server.engines.service import Service, trimmed
from outpace.server.errors import APIError
from outpace.server.observe.delays import Delay, watched
from outpace.server.settings import ServerSettings

# -- connections ------------------------------------------------------------------------------------------------------
# Connections: how many, how long one may take to ask, and which one is closed when another needs its place.
# Uvicorn bounds neither the time of a request's headers nor connections by address, so its protocol is extended here.
# A connection whose request has not arrived gives way to a new one, the longest such first; one that is being answered
# is never closed for another.

log = logging.getLogger(__name__)

BURST = 32  # connections accepted at once, before the event loop may close others for them
_SPARE = 64  # files beside connections: the model's, sockets just accepted, epoll, logs
_READ = 8192  # bytes of a read: the event loop parses no more at once
_CHUNKS = 1024  # of a body, beside one for every _CHUNK bytes; each costs as much as a large one
_CHUNK = 64


class Connections:
    """All open connections. ``most``: at once; ``most_each``: of one address."""

    def __init__(self, settings: ServerSettings) -> None:
        files = os.sysconf("SC_OPEN_MAX") if hasattr(os, "sysconf") else -1
        self.most = settings.max_connections if files < 0 else max(min(settings.max_connections, files - _SPARE), 1)
        self.most_each = settings.max_connections_each
        self.header_timeout = settings.header_timeout
        self._open: Counter[str] = Counter()  # by address
        self._waiting: dict[str, dict[Connection, None]] = {}  # for their request, by address, the longest first

    @property
    def count(self) -> int:
        """Those that are open."""
        return self._open.total()

    def enter(self, connection: Connection) -> bool:
        """Whether there is room for it, or was made."""
        address = connection.address
        full, crowded = self.count >= self.most, self._open[address] >= self.most_each
        if (full or crowded) and not self.make_room(address if crowded else None):
            return False
        self._open[address] += 1
        return True

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self.arrived(connection)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]

    def waits(self, connection: Connection) -> None:
        """A request, or the rest of one, has yet to arrive over it."""
        self._waiting.setdefault(connection.address, {}).setdefault(connection)

    def arrived(self, connection: Connection) -> None:
        """Its request is there."""
        waiting = self._waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.address, None)

    def make_room(self, address: str | None = None) -> bool:
        """Close the connection of ``address`` (None: of the one that has most) that has waited longest; False: none
        waits."""
        crowd = [address] if address is not None else [name for name, _ in self._open.most_common()]
        for name in crowd:
            for connection in self._waiting.get(name, ()):
                connection.drop()
                return True
        return False


def _closing(status: int, phrase: str, error: APIError, *headers: str) -> bytes:
    """An answer on a connection that ends with it, where no request was read."""
    body = error.body.model_dump_json()
    own = ("content-type: application/json", f"content-length: {len(body)}", "connection: close", *headers)
    return "\r\n".join([f"HTTP/1.1 {status} {phrase}", *own, "", body]).encode()


_FULL = _closing(
    503, "Service Unavailable",
    APIError(503, "too many connections: try again later", code="too_many_connections"), "retry-after: 1",
)  # fmt: skip
_LATE = _closing(408, "Request Timeout", APIError(408, "the request took too long to arrive: send it again"))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # an interim answer, which may come more than once
_PROBED = 0.05, 5.0  # seconds until a half-closed connection is written to again, at first and at most


class Chunks:
    """Around h11's ``reader`` of chunks: takes all whole ones that are there at once, since one event for each costs
    seven times as much, in the event loop. What is not whole or not plain is left to h11."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.read_eof = reader, reader.read_eof
        self.taken = 1  # chunks, of which the last event's data is

    def __call__(self, buf: Any) -> Any:
        self.taken = 1
        if any(getattr(self._reader, name) for name in _WITHIN):
            return self._reader(buf)
        data, at, found = bytes(buf), 0, list[bytes]()
        while (head := _CHUNK_HEAD.match(data, at)) and (size := int(head[1], 16)):
            begin, end = head.end(), head.end() + size
            if data[end : end + 2] != b"\r\n":
                break
            found.append(data[begin:end])
            at = end + 2
        if len(found) < 2:
            return self._reader(buf)
        self.taken = len(found)
        buf.maybe_extract_at_most(at)
        return h11.Data(data=b"".join(found))


_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_WITHIN = "_bytes_in_chunk", "_bytes_to_discard", "_reading_trailer"  # of h11's reader, where it is within a chunk


class Parser(h11.Connection):
    """Counts the pieces in which a body comes."""

    chunks = length = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = self.length = 0
            reader, buffer = getattr(self, "_reader", None), getattr(self, "_receive_buffer", None)
            inside = all(hasattr(reader, name) for name in (*_WITHIN, "read_eof"))
            if inside and hasattr(buffer, "maybe_extract_at_most"):  # an h11 that names them otherwise reads by itself
                self._reader: Any = Chunks(reader)
        elif isinstance(event, h11.Data):
            reader = getattr(self, "_reader", None)
            self.chunks += reader.taken if isinstance(reader, Chunks) else 1
            self.length += len(event.data)
        return event

    @property
    def crumbles(self) -> bool:
        """Whether a body comes in so many pieces that reading it is an attack."""
        return self.chunks > _CHUNKS + self.length // _CHUNK


class Connection(H11Protocol):
    """Uvicorn's, within the bounds of ``connections``."""

    def __init__(self, connections: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._late: asyncio.TimerHandle | None = None
        self._counted = False
        self.address = ""
        self.conn: Parser = Parser(h11.SERVER)

    def connection_made(self, transport: Any) -> None:
        transport.max_size = _READ
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._counted = self._connections.enter(self)
        if self._counted:
            self._look()
        else:
            transport.write(_FULL)
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._stop()
        if self._counted:
            self._counted = False
            self._connections.leave(self)

    def data_received(self, data: bytes) -> None:
        if not self._counted:
            return
        super().data_received(data)
        if self.conn.crumbles:
            self.transport.abort()
        self._look()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whoever has asked and ends its own side may still read. Whether it does, only writing to it shows."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._probe(cycle, _PROBED[0])
        return True

    def _probe(self, cycle: Any, seconds: float) -> None:
        """Until the answer begins, which shows it, too."""
        if cycle.response_started or cycle.disconnected or self.transport.is_closing():
            return
        if cycle.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)
            self.loop.call_later(seconds, self._probe, cycle, min(2 * seconds, _PROBED[1]))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def drop(self) -> None:
        """Close it at once, and free its place. One that never asked is told why, whatever it was about to ask."""
        if self.cycle is None:
            self.transport.write(_FULL)
        self.transport.abort()
        self._counted = False
        self._connections.leave(self)

    def _look(self) -> None:
        """Whether a request, or the rest of one, is still to come."""
        if not self._counted:
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop()
            (self._connections.waits if cycle.more_body else self._connections.arrived)(self)
            return
        self._connections.waits(self)
        if self._late is None:
            self._late = self.loop.call_later(self._connections.header_timeout, self._let_go)

    def _let_go(self) -> None:
        """Its request took too long; one that waits between requests is closed without a word."""
        if self.cycle is None or self.conn.trailing_data[0]:
            self.transport.write(_LATE)
        self.transport.close()

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def accept_errors(connections: Connections, seconds: float = 1.0) -> Callable[[asyncio.AbstractEventLoop, Any], None]:
    """An event loop's exception handler: failures to accept are logged once in so many seconds, and make room."""
    last, count = -seconds, 0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal last, count
        if not str(context.get("message", "")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
            return
        count += 1
        connections.make_room()
        if time.monotonic() - last >= seconds:
            log.error("%d connections could not be accepted: %s", count, context.get("exception"))
            last, count = time.monotonic(), 0

    return handle


_LAST = 5  # seconds that connections have to close once everything was answered
_BACKLOG = 2048
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}  # of a peer that says nothing: gone in 2 min


def bound(settings: ServerSettings) -> socket.socket:
    """A socket that listens where the settings say. Raises ParameterError when it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it: the kernel drops a reader that takes nothing
            milliseconds = int(1000 * settings.write_timeout)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return listener
    except OSError as error:
        where = Argument("port", settings.port)
        raise ParameterError(
            f"cannot listen at {settings.host} ({error.strerror or error}): give another ", where, " or host"
        ) from error


def steady() -> None:
    """For a process that only serves, once its models are there: threads give way to the event loop soon, and a full
    garbage collection, which holds up all of them, does not walk what stays anyway (60 ms of it)."""
    sys.setswitchinterval(_SWITCH)
    gc.collect()
    gc.freeze()


_SWITCH = 0.0005  # seconds that a thread keeps the interpreter from others: a request changes threads ten times


class Server(uvicorn.Server):
    """Serves ``service`` at ``listener`` until SIGTERM or Ctrl-C; a second one ends it at once."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.connections = Connections(service.settings)
        protocol: Any = partial(Connection, self.connections)
        config = uvicorn.Config(
            create_app(service),
            http=protocol,
            ws="none",
            backlog=BURST,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_LAST,
            server_header=False,
        )
        super().__init__(config)
        self._service, self._listener = service, listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens; of use where the settings said port 0."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    async def run_until_stopped(self) -> None:
        """Serve until ``stop`` or a signal."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(accept_errors(self.connections))
        tasks = [self._loop.create_task(each) for each in (trimmed(self._service), watched(self._delayed))]
        try:
            await self.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()

    def _delayed(self, delay: Delay) -> None:
        for observer in self._service.observers:
            observer.delayed(delay)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.listen(_BACKLOG)  # how many wait; uvicorn's backlog also says how many are accepted at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """New requests get 503 while those that run end; then the sockets close."""
        if self._draining is not None or not self.started:
            self.force_exit = self.should_exit = True
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to end; in the event loop's thread."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True
