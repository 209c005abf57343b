"""Bodies of requests: read within bounds of size, time and memory, and counted before anything is built of them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import numpy as np
from starlette.requests import ClientDisconnect, Request

from outpace.server.engines.service import Service
from outpace.server.errors import APIError
from outpace.server.schema import M, parsed

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
