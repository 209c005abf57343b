"""Nothing holds the server's event loop: what takes long runs in threads, and how late the loop is can be seen."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import h11
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outpace import Engine
from outpace.server.engines import runner
from outpace.server.engines.runner import Parser
from outpace.server.observe.metrics import Metrics
from tests.native.native_helpers import Tiny
from tests.server.serving import Running, serving

TURNS = 6_000_000  # of an empty loop: their time is the most that a callback may take; the longest takes a third of it
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
BROKEN = (b"+1\r\na\r\n", b"1\r\naa\r\n", b"\r\n")  # chunks


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    with Tiny() as its:
        path = its.path("Q8_0", layers=1, tokenizer=1, vocab=180, context=4096)
        engine = Engine.load(str(path), drafter="none", max_rows=4)
        with serving(engine, name="tiny", observers=[Metrics()]) as running:
            yield running


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[float, str]]]:
    """The seconds of thread time of every callback, each with what it was."""
    found, own = list[tuple[float, str]](), asyncio.events.Handle._run

    def measured(handle: Any) -> None:
        begun = time.thread_time()
        own(handle)
        found.append((time.thread_time() - begun, repr(handle)))

    monkeypatch.setattr(asyncio.events.Handle, "_run", measured)
    gc.disable()  # the tests' objects are many more than a server's
    yield found
    gc.enable()


def test_no_request_holds_the_loop(tiny: Running, longest: list[tuple[float, str]]) -> None:
    """Those that are the longest to describe, to read, to prepare or to write."""
    begun = time.thread_time()
    for _ in range(TURNS):
        pass
    most = time.thread_time() - begun
    prompt = [5 + i % 100 for i in range(4000)]
    echo = {"prompt": prompt, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
    schema = {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(200)}, "required": ["a0"]}
    made = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for path in ("/openapi.json", "/docs", "/metrics"):
        assert tiny.http.get(path).status_code == 200
    assert tiny.post("/v1/completions", echo).status_code == 200
    assert tiny.post("/v1/completions", {"prompt": "a" * 8_000_000}).status_code == 400
    assert tiny.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "response_format": made}).status_code == 200
    assert tiny.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 8000}).status_code == 400
    for _ in range(4):
        with socket.create_connection(tiny.server.address, timeout=30) as connection, pytest.raises(OSError):
            connection.sendall(HEAD + b"1\r\n \r\n" * 1_000_000)
    assert max(longest)[0] < most, (most, sorted(longest)[-3:])


def test_chunks_are_read_as_h11_reads_them_but_many_at_once() -> None:
    crumbs = [HEAD + b"1\r\na\r\n" * 1000]
    assert read(Parser(h11.SERVER), crumbs)[:2] == (1, b"a" * 1000)
    dice = random.Random(0)
    for _ in range(400):
        sizes = [dice.choice((1, 2, 15, 16, 700)) for _ in range(dice.randrange(1, 40))]
        ends = (b"\r\n", b"\r\n", b"\r\n", b"\r\n", b";a=b\r\n", b" \r\n", b"\n")
        ends = ends[: 4 if dice.random() < 0.5 else 7]
        parts = [b"%x" % size + dice.choice(ends) + dice.randbytes(size) + b"\r\n" for size in sizes]
        if dice.random() < 0.3:
            parts.insert(dice.randrange(len(parts) + 1), dice.choice(BROKEN))
        parts += [dice.choice((b"0\r\n\r\n", b"0\r\na: b\r\n\r\n", b"")), HEAD[: dice.randrange(9)]]
        sent = HEAD + b"".join(parts)
        cuts = sorted(dice.randrange(len(sent)) for _ in range(dice.randrange(6)))
        pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
        ours, theirs = read(Parser(h11.SERVER), pieces), read(h11.Connection(h11.SERVER), pieces)
        assert ours[1:] == theirs[1:], (sizes, pieces)


def test_an_h11_with_other_names_reads_chunks_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_WITHIN", ("_renamed",))
    crumbs = [HEAD + b"1\r\na\r\n" * 1000]
    parser = Parser(h11.SERVER)
    assert read(parser, crumbs) == read(h11.Connection(h11.SERVER), crumbs)
    assert parser.chunks == 1000


def read(parser: h11.Connection, pieces: list[bytes]) -> tuple[int, bytes, list[str], bytes]:
    """How many events had data, all of it, what else came, and what is left."""
    count, body, others = 0, b"", list[str]()
    for piece in pieces:
        if not piece:
            continue
        parser.receive_data(piece)
        try:
            while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Data):
                    count, body = count + 1, body + bytes(event.data)
                else:
                    others.append(repr(event))
        except h11.RemoteProtocolError as error:
            others.append(str(error))
            break
    return count, body, others, parser.trailing_data[0]


def test_the_metrics_say_why_the_loop_was_late(tiny: Running) -> None:
    def busy() -> None:
        end = time.thread_time() + 0.4
        while time.thread_time() < end:
            pass

    before = delays(tiny)
    tiny.loop.call_soon_threadsafe(busy)
    tiny.loop.call_soon_threadsafe(time.sleep, 0.4)
    wait(tiny, 3)
    after = delays(tiny)
    assert after["loop"] - before["loop"] > 0.25
    assert after["threads"] - before["threads"] > 0.25
    sums = [after[cause] for cause in ("loop", "threads", "machine")]
    assert after["total"] == pytest.approx(sum(sums), abs=1e-6)


def wait(tiny: Running, looks: int) -> None:
    """Until the loop was looked at so many times more."""
    seen, looked = threading.Event(), list[object]()
    own = tiny.service.observers[0].delayed

    def delayed(delay: Any) -> None:
        own(delay)
        looked.append(delay)
        if len(looked) == looks:
            seen.set()

    tiny.service.observers[0].delayed = delayed  # type: ignore[method-assign]
    assert seen.wait(60)
    tiny.service.observers[0].delayed = own  # type: ignore[method-assign]


def delays(tiny: Running) -> dict[str, float]:
    """The seconds so far, by cause."""
    text = httpx.get(f"{tiny.url}/metrics").text
    (family,) = [each for each in text_string_to_metric_families(text) if each.name == "outpace_loop_delay_seconds"]
    return {each.labels["cause"]: each.value for each in family.samples if each.name.endswith("_sum")}
