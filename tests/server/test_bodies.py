"""Bodies: what is too much is refused before anything is built of it; who sends much is in nobody else's way."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace import Engine
from outpace.server.api import route
from outpace.server.api.chat import ChatRequest
from outpace.server.api.replay import ReplayRequest
from outpace.server.api.route import check_values, understood
from outpace.server.engines.shares import KEY, Shares, Workers
from outpace.server.errors import APIError
from outpace.text.tokenizer import Tokenizer
from tests.server.serving import Running

_JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\,[{]}:\u20ac'), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\,[{', max_size=4), inner, max_size=4),
    max_leaves=30,
)


def counts(value: Any) -> Counter[str]:
    """Of a value: itself, lists and objects, and strings, names included."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    found = Counter(strings=isinstance(value, str), lists=isinstance(value, (list, dict)))
    found["values"] = found["lists"] + (max(len(value) - 1, 0) if found["lists"] else 0)
    return sum(map(counts, inner), found)


@given(_JSON, st.booleans())
def test_values_are_counted_as_json_has_them(value: Any, ascii_only: bool) -> None:
    body, found = json.dumps(value, ensure_ascii=ascii_only).encode(), counts(value)
    least = max(found["values"], 4 * found["strings"], 16 * found["lists"])
    check_values(body, least)
    if least:
        with pytest.raises(APIError, match="the body has more than"):
            check_values(body, least - 1)


@pytest.mark.parametrize("item", [b"1", b"[]", b"{}", b'"a"', b'{"role":"user","content":"a"}', b'"a":0'])
def test_the_worst_json_is_refused_unread(demo: Running, monkeypatch: pytest.MonkeyPatch, item: bytes) -> None:
    """8 MiB of it took up to 41 s and 5.6 GB, in which nobody else was answered."""
    monkeypatch.setattr(route, "parsed", None)
    body = b'{"messages":[%s]}' % b",".join([item] * (8_000_000 // (len(item) + 1)))
    answer = demo.post("/v1/chat/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_long_answers_are_replayed_and_more_is_refused_unread(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(tokens: int) -> bytes:
        entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
        choice = {"message": {"content": "a" * tokens}, "logprobs": {"content": [entry] * tokens}}
        request = {"messages": [{"role": "user", "content": "a"}]}
        answer = {"object": "chat.completion", "choices": [choice]}
        return json.dumps({"request": request, "answer": answer}).encode()

    read = understood(ReplayRequest, body(10_000), 1 << 17)
    assert len(read.answer.choices[0]["logprobs"]["content"]) == 10_000
    monkeypatch.setattr(route, "parsed", None)
    answer = demo.post("/v1/replay", body(22_000))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_texts_are_no_values() -> None:
    text = '[{,"\\' * 100_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    assert understood(ChatRequest, body, 1024).messages[0].content == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a b " * 700_000}, "prompt"),
        ("/v1/completions", {"prompt": "a b " * 1_000_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 1_000_000}]}, "messages"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 1025}, "bad_words"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a" * 257]}, "bad_words"),
        ("/v1/completions", {"prompt": "a", "stop": ["a" * 1025]}, "stop"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "speculation": {"x" * 1_000_000: 1}}, "speculation"),
    ],
)
def test_what_is_long_to_prepare_is_refused_before(
    demo: Running, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.text.tokenizer.Tokenizer.encode", None)
    answer = demo.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"].partition(".")[0]) == (400, param.partition(".")[0])
    assert len(answer.content) < 3000


def test_long_texts_are_tokens_where_those_are_few(demo: Running, plain: Engine) -> None:
    """What is cut into pieces to see that is encoded whole, all the same."""
    assert plain.tokenizer is not None
    for text in ("several words " * 20_000, "-" * 100_000):
        tokens = plain.tokenizer.encode(text).tolist()
        assert demo.answer("/tokenize", {"prompt": text})["tokens"] == tokens
    blanks = {"prompt": " " * 100_000, "max_tokens": 1}  # 64 of them are a token
    assert demo.answer("/v1/completions", blanks)["usage"]["prompt_tokens"] == 1563
    chat = {"messages": [{"role": "user", "content": " " * 100_000}], "max_tokens": 1}
    assert demo.answer("/v1/chat/completions", chat)["usage"]["prompt_tokens"] > 1563


@pytest.mark.parametrize(
    ("path", "length", "most"),
    [("/tokenize", 350_000, 2 << 17), ("/v1/completions", 160_000, 4096), ("/v1/chat/completions", 160_000, 4096)],
)
def test_long_texts_of_many_tokens_are_refused_by_their_beginning(
    demo: Running, path: str, length: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digit is a token: once 600,000 of them took half a second and 200 MB."""
    text, encoded, piece = "1" * length, list[int](), 1 << 16
    original = Tokenizer.encode

    def encode(self: Tokenizer, text: str, **how: bool) -> Any:
        encoded.append(len(text))
        return original(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    assert demo.post(path, body).status_code == 400
    assert max(encoded) <= piece
    assert piece <= sum(encoded) <= most + piece


def test_keys_take_turns_and_one_never_has_all_places() -> None:
    """Ten jobs of one key wait; another's is begun at once, and its second before the other eight."""

    async def scenario() -> None:
        shares, begun, given = Shares(3, 2), list[str](), list[Any]()

        async def job(key: str) -> None:
            KEY.set(key)
            given.append(await shares.take())
            begun.append(key)

        jobs = [asyncio.create_task(job(key)) for key in "aaaaaaaaaabb"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert begun == ["a", "a", "b"]
        jobs[2].cancel()  # who left is passed over
        while given:
            given.pop(0)()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert begun[3] == "b" or begun[4] == "b"
        assert Counter(begun) == {"a": 9, "b": 2}
        assert shares._free == 3
        assert not +shares._held
        assert not shares._waiting

    copy_context().run(asyncio.run, scenario())


def test_a_thread_is_its_keys_until_the_work_has_ended() -> None:
    """Who leaves cannot have more of them by asking anew."""

    async def scenario() -> None:
        workers, begun, go_on = Workers(shared=True), list[int](), asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(number: int) -> None:
            begun.append(number)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)

        for number in range(20):
            leaving = asyncio.create_task(workers.run(work, number))
            await asyncio.sleep(0.001)
            leaving.cancel()
        KEY.set("another")
        assert await workers.run(lambda: len(begun)) <= 2
        go_on.set()
        workers.close()

    copy_context().run(asyncio.run, scenario())


def test_a_body_that_does_not_move_loses_its_place(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits alone has its time; beside another it has until the next look."""
    monkeypatch.setattr(route, "MOVES", 0.2)
    monkeypatch.setattr(demo.service, "large", Shares(1, 1))
    half = b'{"prompt": "' + b"a" * (route.SMALL + 9)
    with socket.create_connection(demo.server.address, timeout=30) as slow:
        head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: {len(half) + 2}\r\n\r\n".encode() + half)
        slow.settimeout(1)
        with pytest.raises(TimeoutError):
            slow.recv(1)
        slow.settimeout(30)
        began = time.perf_counter()
        assert demo.post("/tokenize", {"prompt": "b" * (route.SMALL + 9)}).status_code == 200
        assert time.perf_counter() - began < 20  # of the 60 that a body has
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_body_is_looked_at_from_when_it_has_its_place(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that got its place shortly before has as long as any other to move."""
    monkeypatch.setattr(route, "MOVES", 1.0)
    shares = Shares(1, 1)
    monkeypatch.setattr(demo.service, "large", shares)
    body = b'{"prompt": "' + b"a" * (2 * route.SMALL) + b'"}'
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(demo.server.address, timeout=30) as late, ThreadPoolExecutor(1) as threads:
        late.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.7)
        late.sendall(body[: route.SMALL + 9])
        time.sleep(0.1)
        other = threads.submit(demo.post, "/tokenize", {"prompt": "b" * (route.SMALL + 9)})
        time.sleep(0.5)  # a look at the old times, in which nothing moved since the place was given
        late.sendall(body[route.SMALL + 9 :])
        assert late.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert other.result().status_code == 200
    for _ in range(50):
        if not shares._held:
            return
        time.sleep(0.05)
    raise AssertionError("a key that holds nothing is kept")


def test_bodies_may_be_gzipped(demo: Running) -> None:
    def sent(body: bytes, encoding: str = "gzip") -> httpx.Response:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        return demo.http.post("/tokenize", content=body, headers=headers)

    body = json.dumps({"prompt": "Paint it."}).encode()
    whole = demo.post("/tokenize", {"prompt": "Paint it."}).json()
    assert sent(gzip.compress(body)).json() == sent(body, "identity").json() == whole
    bomb = gzip.compress(b" " * (demo.service.settings.max_body + 1))
    zipped = gzip.compress(body)
    for refused, status in (
        (bomb, 413), (zipped[:-9], 400), (body, 400), (zipped + b"x", 400), (zipped + gzip.compress(b"x"), 400),
        (gzip.compress(b"") * 2000 + zipped, 400),
    ):  # fmt: skip
        assert sent(refused).status_code == status
    assert sent(gzip.compress(body[:9]) + gzip.compress(body[9:])).json() == whole
    assert sent(body, "").json() == sent(zipped, "gzip, identity").json() == whole
    assert sent(zipped, "gzip, gzip").status_code == 415
    assert "gzip" in sent(body, "br").json()["error"]["message"]
    demo.at_rest()
