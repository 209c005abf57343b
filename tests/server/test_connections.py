"""Connections that say nothing, half of a request, or crumbs: they are let go, and never in the way of others."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest

from outpace import Engine
from outpace.server.engines.runner import accept_errors
from tests.native.native_helpers import Tiny
from tests.server.serving import Running, serving
from tests.server.test_serve_cli import ask, process

HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ENDLESS = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def few() -> Iterator[Running]:
    """Six connections, four of one address; headers have 0.2 s to arrive."""
    bounds = {"max_connections": 6, "max_connections_each": 4, "header_timeout": 0.2}
    with Tiny() as its:
        engine = Engine.load(str(its.path("Q8_0", layers=1, tokenizer=1, vocab=180)), drafter="none", max_rows=4)
        with serving(engine, name="tiny", **bounds) as running:
            yield running


def connect(running: Running, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(running.server.address, timeout=30, source_address=(source, 0))


ASKS = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [(b"", [408]), (b"\r\n", [400]), (HEAD, [408]), (ASKS + b"content-length: 9\r\n\r\n", [200]),
     (ASKS + b"\r\n" + HEAD, [200, 408])],
)  # fmt: skip
def test_who_does_not_ask_is_let_go(few: Running, sent: bytes, answers: list[int]) -> None:
    """Silent, half of the headers, a body that nobody waits for, and half of a second request."""
    with connect(few) as connection:
        connection.sendall(sent)
        found = b"".join(iter(lambda: connection.recv(4096), b""))
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", found)] == answers


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_connection_gets_its_answer(few: Running, stream: bool, version: bytes) -> None:
    with connect(few) as connection:
        asked = _request({**ENDLESS, "max_tokens": 300, "stream": stream})
        connection.sendall(asked.replace(b"HTTP/1.1", b"HTTP/" + version))
        connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection)
        response.begin()  # past interim answers, as a client reads them
        text = response.read().decode()
    assert response.status == 200
    assert text.endswith("data: [DONE]\n\n") if stream else json.loads(text)["usage"]["completion_tokens"] == 300
    few.at_rest()


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_has_its_answer_cancelled(few: Running, stream: bool) -> None:
    """Though it ends as a half-closed one does: with nothing left unread."""
    few.at_rest()
    steps: list[int] = []
    few.on_step(lambda record: steps.append(1))
    with connect(few) as connection:
        connection.sendall(_request({**ENDLESS, "max_tokens": 3000, "stream": stream}))
        while not steps:
            time.sleep(0.005)
    few.at_rest()
    few.on_step(None)
    assert len(steps) < 2900


def _request(body: dict[str, object]) -> bytes:
    text = json.dumps(body).encode()
    return HEAD.replace(b"/tokenize", b"/v1/completions") + b"content-length: %d\r\n\r\n" % len(text) + text


@pytest.mark.parametrize(("keep_alive", "headers"), [(1, 600.0), (600, 0.1)])
def test_an_answered_connection_that_asks_nothing_more_is_closed(keep_alive: int, headers: float) -> None:
    """By uvicorn's time for idle connections, and by that for headers, whichever comes first."""
    with Tiny() as its:
        engine = Engine.load(str(its.path("Q8_0", layers=1, tokenizer=1, vocab=180)), drafter="none")
        with serving(engine, name="tiny", header_timeout=headers) as running:
            running.server.config.timeout_keep_alive = keep_alive
            with connect(running) as connection:
                connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
                while connection.recv(4096):
                    pass


def test_who_asks_is_served_beside_any_number_who_do_not(few: Running) -> None:
    """Silent ones make room, those that are answered never do; where all are answered, the next one is told."""
    with ExitStack() as held:
        for source in ("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.3"):
            assert httpx.get(f"{few.url}/health").status_code == 200
            for _ in range(9):
                held.enter_context(connect(few, source))
            client = httpx.Client(base_url=few.url, transport=httpx.HTTPTransport(local_address=source))
            stream = held.enter_context(held.enter_context(client).stream("POST", "/v1/completions", json=ENDLESS))
            assert stream.status_code == 200
            assert few.server.connections.count <= 6
        refused = httpx.get(f"{few.url}/health")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
    few.at_rest()


def test_a_burst_is_answered_or_told_that_there_are_too_many(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connect before any asks, so that later ones take the places of earlier ones."""
    monkeypatch.setattr(few.server.connections, "header_timeout", 60)
    with ExitStack() as stack:
        burst = [stack.enter_context(connect(few, f"127.0.0.{1 + i % 3}")) for i in range(60)]
        found = []
        for connection in burst:
            with suppress(ConnectionError):
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            found.append(connection.recv(12))
    assert set(found) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}


def test_a_body_in_crumbs_is_cut_off(few: Running) -> None:
    with connect(few) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(b"1\r\na\r\n" * 10_000_000)


def test_few_files_are_enough_to_serve_beside_silent_connections() -> None:
    with ExitStack() as held:
        its, port = held.enter_context(process(files=256))
        for _ in range(300):
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        for _ in range(3):
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200
        assert ask(port)[0] == 200
        its.terminate()
        assert its.stderr is not None
        assert len(its.stderr.read()) < 4096


def test_failures_to_accept_are_logged_once_and_make_room(
    few: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few.server.connections, "header_timeout", 60)
    handle = accept_errors(few.server.connections, seconds=60)
    with connect(few) as silent:
        assert httpx.get(f"{few.url}/health").status_code == 200  # it was accepted before this
        for _ in range(1000):
            few.loop.call_soon_threadsafe(handle, few.loop, {"message": "socket.accept() out of system resource"})
        assert silent.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert silent.recv(1) == b""
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
