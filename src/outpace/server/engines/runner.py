"""uvicorn around the app: on a signal, what runs may end first."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from outpace.errors import Argument, ParameterError
from outpace.server.app import create_app
from outpace.server.engines.connections import BURST, Connection, Connections, accept_errors
from outpace.server.engines.service import Service, trimmed
from outpace.server.settings import ServerSettings

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
        trimming = self._loop.create_task(trimmed(self._service))
        try:
            await self.serve(sockets=[self._listener])
        finally:
            trimming.cancel()

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
