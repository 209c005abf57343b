"""Whatever a connection is used for, in whatever order and pieces, every request over it is answered."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

import h11

from tests.server.scripted import scripted
from tests.server.serving import Running, serving

PATIENCE = 60  # seconds without an answer that are a hang
MESSAGES = [{"role": "user", "content": "Say hello."}]
CHAT = "/v1/chat/completions"
ASKED: Sequence[tuple[str, bytes, int]] = [  # paths, bodies and statuses; no body: GET
    ("/health", b"", 200),
    ("/v1/models", b"", 200),
    ("/nothing", b"", 404),
    (CHAT, json.dumps({"messages": MESSAGES}).encode(), 200),
    (CHAT, json.dumps({"messages": MESSAGES, "stream": True}).encode(), 200),
    ("/v1/messages", json.dumps({"model": "demo", "messages": MESSAGES, "max_tokens": 9}).encode(), 200),
    ("/api/chat", json.dumps({"model": "demo", "messages": MESSAGES}).encode(), 200),
    (CHAT, json.dumps({"messages": MESSAGES, "model": "other"}).encode(), 404),
    (CHAT, b"{" * 100_000, 413),
    ("/v1/nothing", b"x" * 200_000, 404),  # answered before it is read
    (CHAT, b" " * (9 << 20), 413),
]  # fmt: skip


def test_every_request_of_a_connection_is_answered() -> None:
    """Error answers to bodies that are not read, pipelining, chunks, Expect, streams that are left: after any of them a
    lost wake-up would leave the next request without an answer."""
    with serving(scripted(lambda prompt: "Hello, world!")) as its:
        for seed in range(12):
            used(its, random.Random(seed))
        its.at_rest()


def used(its: Running, dice: random.Random) -> None:
    """A connection, until the server or the client ends it."""
    with socket.create_connection(its.server.address, timeout=PATIENCE) as connection:
        for _ in range(6):
            batch = [dice.choice(ASKED) for _ in range(dice.choice((1, 1, 2, 4)))]
            parsers, sent = list[h11.Connection](), b""
            for path, body, _ in batch:
                parsers.append(h11.Connection(h11.CLIENT))
                sent += written(parsers[-1], path, body, dice)
            sending = threading.Thread(target=send, args=(connection, sent, dice.choice((7000, 1 << 20))))
            sending.start()
            left = b""
            for parser, (path, body, status) in zip(parsers, batch, strict=True):
                found, left = answer(parser, connection, left)
                assert found == status, (path, body[:100])
                if parser.their_state is h11.MUST_CLOSE or parser.their_state is h11.CLOSED:
                    connection.shutdown(socket.SHUT_RDWR)
                    sending.join()
                    return
            sending.join()
        connection.sendall(written(h11.Connection(h11.CLIENT), *ASKED[4][:2], dice))
        connection.recv(dice.randrange(1, 400))  # of a stream


def written(parser: h11.Connection, path: str, body: bytes, dice: random.Random) -> bytes:
    """A request, in chunks or not, as h11 writes it."""
    headers = [("host", "localhost"), ("content-type", "application/json")]
    chunked = bool(body) and dice.random() < 0.4
    if body:
        headers.append(("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body))))
    if body and dice.random() < 0.2:
        headers.append(("expect", "100-continue"))
    found = parser.send(h11.Request(method="POST" if body else "GET", target=path, headers=headers))
    size = max(len(body) // dice.randrange(1, 50), 1) if chunked else len(body)
    for begin in range(0, len(body), size or 1):
        found += parser.send(h11.Data(data=body[begin : begin + size]))
    return found + parser.send(h11.EndOfMessage())


def send(connection: socket.socket, data: bytes, size: int) -> None:
    with suppress(OSError):  # it was answered and closed before it was read
        for begin in range(0, len(data), size):
            connection.sendall(data[begin : begin + size])


def answer(parser: h11.Connection, connection: socket.socket, data: bytes) -> tuple[int, bytes]:
    """A status, once the whole answer is there, and what came after it."""
    status = 0
    parser.receive_data(data) if data else None
    while True:
        event = parser.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.EndOfMessage):
            return status, parser.trailing_data[0]
        elif event is h11.NEED_DATA:
            parser.receive_data(connection.recv(1 << 16))
