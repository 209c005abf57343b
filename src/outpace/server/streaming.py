"""Server-sent events as an ASGI response: errors in mid-stream, signs of life, readers that go away or take nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from outpace.engine.aio import Watch
from outpace.server import errors
from outpace.server.errors import APIError

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ALIVE = b": still working\n\n"
DONE = b"data: [DONE]\n\n"
FINGERPRINT = "system-fingerprint"  # a header of streams: a resumed one may not have it otherwise


@dataclass(frozen=True, slots=True)
class Format:
    """A stream's content type, and what is sent while there is nothing to say."""

    media_type: str
    alive: bytes


EVENTS = Format("text/event-stream; charset=utf-8", ALIVE)


def event(data: bytes, name: str | None = None) -> bytes:
    """One event with ``data``, JSON."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, data)


def _failed(error: APIError) -> bytes:
    return event(error.body.model_dump_json().encode()) + DONE


async def gone(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends ``events``, then ends. An error that they raise is the last event. ``close`` is called whatever happens.
    ``write_timeout``: seconds that a reader may take for what was written, after which it is disconnected. ``failed``:
    the event of an error; default: that of chats and completions; ``fingerprint``: of the model."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]],
        write_timeout: float,
        failed: Callable[[APIError], bytes] | None,
        media_type: str,
        fingerprint: str,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", FINGERPRINT: fingerprint})
        self.raw_headers = [(b"content-type", media_type.encode())] + [
            its for its in self.raw_headers if its[0] != b"content-length"
        ]
        self._events, self._close, self._write_timeout = events, close, write_timeout
        self._failed = failed or _failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            patience = Watch(self._write_timeout, lambda: writing.cancel())
            writing = asyncio.ensure_future(self._write(send, patience))
            leaving = asyncio.ensure_future(gone(receive))
            try:
                await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                patience.close()
                for task in (writing, leaving):
                    task.cancel()
                done = await asyncio.gather(writing, leaving, return_exceptions=True)
        finally:
            await self._events.aclose()
            await self._close()
        if isinstance(done[0], Exception) and not isinstance(done[0], OSError):
            raise done[0]

    async def _write(self, send: Send, patience: Watch) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await _send(send, data, patience)
        except OSError:
            raise
        except Exception as error:
            refused = errors.of(error)
            if refused is not error and refused.status >= 500:
                log.exception("a stream failed")
            await _send(send, self._failed(refused), patience)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, data: bytes, patience: Watch) -> None:
    patience.begin()
    await send({"type": "http.response.body", "body": data, "more_body": True})
    patience.end()
