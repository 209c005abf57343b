"""Who comes, waits, goes away, reads slowly, or is not let in; and what is left of them."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from outpace import Engine
from outpace.common import allocator
from outpace.engine import core
from outpace.server.engines.service import Service
from tests.server.serving import Running, serving

LONG = {
    "model": "demo", "messages": [{"role": "user", "content": "Go on and on."}], "max_tokens": 1500, "ignore_eos": True,
    "temperature": 0,
}  # fmt: skip
SHORT = {**LONG, "max_tokens": 3}


def engine(**options: Any) -> Engine:
    return Engine.load("demo", drafter="ngram", **{"max_length": 2048, "max_rows": 2, **options})


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """Two rows, a queue of two."""
    with serving(engine(), queue=2, write_timeout=1.0, keep_alive=0.05) as running:
        yield running


KEYS = ("first-secret-key", "second-secret-key")
ORIGIN = "https://example.org"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """Let in are two keys, and pages of one origin; 402 places, of which one key alone comes to half."""
    with serving(engine(), api_keys=KEYS, cors=(ORIGIN,), queue=400) as running:
        yield running


def raw(running: Running, body: dict[str, Any], **headers: str) -> socket.socket:
    """A request that was sent; its answer is not read."""
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection = socket.create_connection(("127.0.0.1", running.server.address[1]), timeout=30)
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def post(running: Running, body: dict[str, Any], **headers: str) -> tuple[int, Any, Any]:
    answer = running.post("/v1/chat/completions", body, **headers)
    return answer.status_code, answer.headers, answer.json()


def rows(running: Running) -> int:
    found: int = running.call(running.engine.ask(lambda its: len(its.model.kv.rows)))
    return found


def until(running: Running, inside: int) -> None:
    """Wait until so many samples are in the house."""
    end = time.monotonic() + 20
    known = running.service.known("demo")
    while (known := running.service.known("demo")) is None or known.admission.inside != inside:
        assert time.monotonic() < end, known and known.admission.inside
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away_leave_nothing(small: Running, stream: bool) -> None:
    for moment in (0, 0.01, 0.05, 0.2):
        for n in (1, 2):
            connection = raw(small, {**LONG, "stream": stream, "n": n})
            time.sleep(moment)
            connection.close()
    until(small, 0)
    small.at_rest()
    assert post(small, SHORT)[0] == 200


def test_a_client_that_goes_away_frees_its_row_within_a_step(small: Running) -> None:
    connection = raw(small, {**LONG, "stream": True})
    connection.recv(4096)
    steps: list[int] = []

    def watch(record: Any) -> None:
        steps.append(record.index)

    small.on_step(watch)
    connection.close()
    until(small, 0)
    before = len(steps)  # the cancellation is in the engine's inbox by now
    small.at_rest()
    assert len(steps) <= before + 1  # the one that was under way
    small.on_step(None)


def test_the_queue_is_bounded(small: Running) -> None:
    held = [raw(small, {**LONG, "stream": True}) for _ in range(4)]
    until(small, 4)
    status, headers, answer = post(small, SHORT)
    assert status == 429
    assert answer["error"]["code"] == "queue_full"
    assert 1 <= int(headers["retry-after"]) <= 60
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):  # what asks no engine, too
        assert small.answer(path, body, 429)["error"]["code"] == "queue_full"
    status, _, answer = post(small, {**SHORT, "n": 5})
    assert (status, answer["error"]["param"]) in ((429, None), (400, "n"))
    for connection in held:
        connection.close()
    until(small, 0)
    status, _, answer = post(small, {**SHORT, "n": 5})
    assert (status, answer["error"]["param"]) == (400, "n")
    small.at_rest()


def test_a_reader_that_takes_nothing_is_let_go(small: Running) -> None:
    """Its receive buffer is small and full, and so is what the kernel keeps here: the request ends, its row is free."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", small.server.address[1]))
    body = {**LONG, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 2}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    until(small, 2)
    other = post(small, SHORT)  # others are served meanwhile
    assert other[0] == 200
    until(small, 0)
    small.at_rest()
    connection.close()


def test_a_deadline_ends_an_answer_as_it_is(small: Running) -> None:
    status, _, answer = post(small, {**LONG, "deadline": 0.3})
    assert status == 200
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    assert answer["usage"]["completion_tokens"] < 1500


def test_a_stream_shows_signs_of_life(small: Running) -> None:
    """While a step lasts, comments keep the connection open, and clients read past them."""
    said = b""
    with small.held():
        waiting = raw(small, {**LONG, "max_tokens": 40, "stream": True})
        while b": still working\n\n" not in said:
            part = waiting.recv(65536)
            assert part, said
            said += part
    while not said.endswith(b"0\r\n\r\n"):
        said += waiting.recv(65536)
    waiting.close()
    assert b"[DONE]" in said


def test_a_request_that_fails_fails_alone(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in one sequence, in mid-stream: its client is told, and another's answer is what it would have been."""
    expected = post(small, {**LONG, "max_tokens": 40})[2]["choices"][0]["message"]
    original = core.Sequence.extended

    def faulty(self: Any, tokens: list[int]) -> Any:
        if self.request.seed == 13 and self.length > self.prompt_length + 5:
            from outpace.errors import RuleError

            raise RuleError("a rule broke")
        return original(self, tokens)

    monkeypatch.setattr(core.Sequence, "extended", faulty)
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(post, small, {**LONG, "max_tokens": 40})
        with pytest.raises(openai.APIError, match="a rule broke"):
            list(
                small.client().chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "Go on."}], seed=13, stream=True, max_tokens=40,
                    extra_body={"ignore_eos": True, "bad_words": ["zebra"]},
                )
            )  # fmt: skip
        status, _, answer = post(small, {**LONG, "seed": 13, "bad_words": ["zebra"]})
        assert (status, answer["error"]["message"]) == (500, "a rule broke")
        assert good.result()[2]["choices"][0]["message"] == expected
    small.at_rest()


def test_keys(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    long_prompt = [{"role": "user", "content": "The same beginning for everybody, and quite long too. " * 4}]
    with caplog.at_level(logging.DEBUG):
        for wrong in ({}, {"authorization": "Bearer nope"}, {"authorization": f"Basic {KEYS[0]}"}):
            status, headers, answer = post(guarded, SHORT, **wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        told = []
        for key in (KEYS[0], KEYS[1], KEYS[0]):
            status, _, answer = post(guarded, {**SHORT, "messages": long_prompt}, authorization=f"Bearer {key}")
            assert status == 200
            told.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["message"]))
        assert told[0][0] == told[1][0] == 0 < told[2][0]
        assert told[0][1] == told[1][1] == told[2][1]
        for path, status in (("/health", 200), ("/ready", 200), ("/v1/models", 401), ("/metrics", 401)):
            assert (path, guarded.http.get(path).status_code) == (path, status)
            assert path not in ("/health", "/ready") or guarded.http.head(path).status_code == status
        both = [("authorization", f"Bearer {key}") for key in ("nope", KEYS[0])]
        assert guarded.http.get("/v1/models", headers=both).status_code == 400
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert not any(key in said for key in KEYS)
    assert "same beginning" not in said


def test_a_flood_of_one_key_holds_up_another_by_one_answer(guarded: Running) -> None:
    """200 answers of one key wait for two rows; the other key's only one is begun as soon as one of them has ended."""
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    flood = [raw(guarded, {**LONG, "max_tokens": 16, "n": 100, "stream": True}, **first) for _ in range(2)]
    until(guarded, 200)
    assert post(guarded, SHORT, **second)[0] == 200
    assert guarded.call(guarded.engine.ask(lambda its: its.snapshot().waiting)) > 100
    for connection in flood:
        connection.close()
    until(guarded, 0)
    guarded.at_rest()


def test_a_flood_of_one_key_leaves_places_to_another(guarded: Running) -> None:
    """Of 300 requests of one key those beyond its share are refused at once; the other's is let in and answered, and
    whoever was let in stays so: streams end as they would have."""
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    guarded.on_step(lambda record: time.sleep(0.01))  # so that few are answered while the others come
    flood = [raw(guarded, {**LONG, "max_tokens": 24, "stream": True}, **first) for _ in range(300)]
    heads = [connection.recv(4096) for connection in flood]  # of a stream it comes at once
    refused = [head for head in heads if head.startswith(b"HTTP/1.1 429 ")]
    assert all(head.startswith(b"HTTP/1.1 200 ") for head in heads if head not in refused)
    guarded.on_step(None)
    assert 0 < len(refused) <= 99  # 201 have places; some of those have been answered by now
    assert all(b"\r\nretry-after: " in head for head in refused)
    status, headers, answer = post(guarded, {**LONG, "n": 100}, **first)  # more than what has ended meanwhile
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (429, "queue_share", "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert post(guarded, SHORT, **second)[0] == 200
    assert guarded.call(guarded.engine.ask(lambda its: its.snapshot().waiting)) > 100
    let_in = [connection for connection, head in zip(flood, heads, strict=True) if head not in refused]
    whole = heads[flood.index(let_in[0])]
    while piece := let_in[0].recv(65536):
        whole += piece
        if whole.endswith(b"0\r\n\r\n"):
            break
    assert b"[DONE]" in whole
    assert b'"error"' not in whole
    for connection in flood:
        connection.close()
    until(guarded, 0)
    guarded.at_rest()


def test_told_to_stop_it_answers_everybody() -> None:
    """What runs ends; what comes is refused; what takes too long is told so, streamed or not."""
    with serving(engine(), drain=2.0) as running, ThreadPoolExecutor(4) as threads:
        with running.held() as reached:
            brief = threads.submit(post, running, {**LONG, "max_tokens": 4})
            assert reached.wait(30)  # before the others, or it would wait for one of two rows
            whole = threads.submit(post, running, LONG)
            stream = raw(running, {**LONG, "stream": True})
            until(running, 3)
        running.on_step(lambda record: time.sleep(0.005))  # so that 1,500 tokens take longer than 2 s anywhere
        running.loop.call_soon_threadsafe(running.server.stop)
        while not running.service.draining:
            time.sleep(0.005)
        status, _, answer = post(running, SHORT)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert brief.result(30)[0] == 200
        status, _, answer = whole.result(30)
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        said = b""
        while piece := stream.recv(65536):
            said += piece
        stream.close()
        assert b'"code":"shutting_down"' in said
        assert b"[DONE]" in said


def test_sdks_in_pages_of_allowed_origins_are_answered() -> None:
    wanted = (
        "x-stainless-os,x-stainless-retry-count,anthropic-dangerous-direct-browser-access,anthropic-version,x-api-key"
    )
    asked = {"access-control-request-method": "POST", "access-control-request-headers": wanted}
    asked["access-control-request-private-network"] = "true"
    model = Engine.load("demo", drafter="none", max_length=64)
    with serving(model, cors=("https://a.example", "vscode-webview://", "app://obsidian.md")) as running:
        for origin, allowed in {
            "https://a.example": True, "vscode-webview://1hk": True, "app://obsidian.md": True, "app://other": False,
            "https://b.example": False, "chrome-extension://abc": False, "null": False,
        }.items():  # fmt: skip
            response = running.http.options("/v1/messages", headers={"origin": origin, **asked})
            assert (response.status_code == 200) is allowed, origin
            assert (response.headers.get("access-control-allow-origin") == origin) is allowed
            if allowed:
                assert {*wanted.split(",")} <= {*response.headers["access-control-allow-headers"].split(",")}
                assert response.headers["access-control-allow-private-network"] == "true"
            answer = running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, origin=origin)
            assert answer.status_code == (200 if allowed else 403)


def test_cross_origin_requests_are_off_unless_asked_for(small: Running, guarded: Running) -> None:
    assert "access-control-allow-origin" not in post(small, SHORT, origin=ORIGIN)[1]
    key = {"authorization": f"Bearer {KEYS[0]}"}
    assert post(guarded, SHORT, origin=ORIGIN, **key)[1]["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in post(guarded, SHORT, origin="https://example.com", **key)[1]


def test_when_nobody_asks_free_memory_goes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the model was loaded, and after whoever was there; never beside a request. Other servers of this process,
    which give theirs back when they like, do not count."""
    looked: list[tuple[Service, int, int]] = []
    work = Service.work

    async def seen(self: Service, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is allocator.trim:
            looked.append((self, self.came, self.inside))
        return await work(self, function, *arguments)

    monkeypatch.setattr(Service, "work", seen)
    with serving(engine(), idle=0.02) as running:

        def trimmed() -> list[int]:
            return [came for service, came, _ in looked if service is running.service]

        def given_back() -> None:
            """The next requests wait for this: what was decided for those so far would be counted with theirs."""
            end = time.monotonic() + 20
            while running.service.came not in trimmed():
                assert time.monotonic() < end
                time.sleep(0.005)

        given_back()
        for _ in range(2):
            held = raw(running, {**LONG, "stream": True})
            until(running, 1)
            assert post(running, SHORT)[0] == 200
            held.close()
            running.at_rest()
            given_back()
        time.sleep(0.2)
    assert trimmed() == [0, 2, 4]
    assert {inside for service, _, inside in looked if service is running.service} == {0}
