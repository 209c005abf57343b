"""Who runs first, how long anybody waits, and what is told to those who wait when the server ends."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from outpace import AsyncEngine, Engine, SamplingParams
from outpace.server import auth
from outpace.server.auth import Keys
from outpace.server.engines.generation import Caller, Work
from outpace.server.engines.service import Service
from outpace.server.errors import APIError
from outpace.server.settings import ServerSettings
from tests.native.native_helpers import Tiny
from tests.server.serving import Running, serving

LONG = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 2}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with Tiny() as its:
        yield its


def engine(tiny: Tiny, **options: Any) -> Engine:
    """Plain decoding, of which no step takes less than 2 ms."""
    its = Engine.load(str(tiny.path("Q8_0", layers=1, tokenizer=1, vocab=180)), drafter="none", **options)
    its.on_step = lambda record: time.sleep(0.002)
    return its


@pytest.fixture(scope="module")
def single(tiny: Tiny) -> Iterator[Running]:
    """One row; bodies have a second to arrive."""
    with serving(engine(tiny, max_rows=1), name="tiny", body_timeout=1.0) as running:
        yield running


def ask(running: Running, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = running.answer("/v1/completions", body)
    return found


def until_waiting(running: Running, waiting: int) -> None:
    """Until so many samples wait for a row in the engine itself."""

    async def reached() -> None:
        async with asyncio.timeout(20):
            while await running.engine.ask(lambda its: its.snapshot().waiting) != waiting:
                await asyncio.sleep(0.002)

    running.call(reached())


def test_higher_priorities_and_deadlines_come_first_among_those_who_wait(single: Running) -> None:
    with (
        ThreadPoolExecutor(3) as threads,
        single.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first,
    ):
        pieces = first.iter_bytes()  # which close the stream once they are gone
        next(pieces)
        late: Future[dict[str, Any]] = threads.submit(ask, single, {**SHORT, "deadline": 0.05})
        ended = late.result(30)  # it waited for its row in vain
        assert (ended["choices"][0]["finish_reason"], ended["choices"][0]["stop_reason"]) == ("length", "deadline")
        assert ended["usage"]["completion_tokens"] == 0
        usual = threads.submit(ask, single, {**LONG, "max_tokens": 1000})
        until_waiting(single, 1)
        urgent = threads.submit(ask, single, {**SHORT, "priority": 1})
        until_waiting(single, 2)
        first.close()
        done, _ = wait([usual, urgent], 30, FIRST_COMPLETED)
        assert urgent in done
        assert not usual.done()
        assert usual.result(30)["usage"]["completion_tokens"] == 1000
    single.at_rest()


def test_a_body_that_does_not_arrive_is_not_waited_for(single: Running) -> None:
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", single.server.address[1]), timeout=30) as connection:
        connection.sendall(head.encode())
        said = connection.recv(65536)
    assert said.startswith(b"HTTP/1.1 408 ")
    single.at_rest()


def test_the_servers_own_deadline_ends_answers_too(tiny: Tiny) -> None:
    with serving(engine(tiny), name="tiny", request_timeout=0.1) as running:
        for more in ({}, {"deadline": 1000}):
            answer = ask(running, {**LONG, **more})
            assert answer["choices"][0]["stop_reason"] == "deadline"
            assert answer["usage"]["completion_tokens"] < LONG["max_tokens"]


def test_prefixes_are_shared_by_default_and_within_a_salt(single: Running) -> None:
    def cached(**more: Any) -> int:
        usage = ask(single, {**SHORT, "prompt": "The same beginning for everybody. " * 3, **more})["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached() > 0, cached() > 0, cached(reuse_prefix=False) > 0] == [False, True, False]
    assert [cached(cache_salt=salt) > 0 for salt in "abab"] == [False, False, True, True]


def test_who_gives_way_when_memory_runs_out_says_the_same(tiny: Tiny) -> None:
    bodies = [{**LONG, "prompt": "abcd"[i], "max_tokens": 200} for i in range(4)]
    with serving(engine(tiny), name="tiny") as running:
        expected = [ask(running, body)["choices"] for body in bodies]
    with serving(engine(tiny, kv_memory="64KiB"), name="tiny") as running, ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda body: ask(running, body)["choices"], bodies)) == expected
        assert running.call(running.engine.ask(lambda its: its.snapshot().preemptions)) > 0
        error = running.answer("/v1/completions", LONG, 400)["error"]
        assert error["code"] == "context_length_exceeded"
        running.at_rest()


def test_keys_are_compared_alike_wherever_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    found: set[str] = set()
    original = auth.hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return original(a, b)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = Keys([f"secret-key-{i}" for i in range(5)])
    others = Keys(["another", *(f"secret-key-{i}" for i in range(4, -1, -1))])
    for given, known in (("secret-key-0", True), ("secret-key-4", True), ("x", False), ("s" * 999, False)):
        compared.clear()
        if not known:
            with pytest.raises(APIError):
                keys.scope("/v1/models", [f"Bearer {given}"])
        else:
            scope = keys.scope("/v1/models", [f"Bearer {given}"])
            assert scope not in found
            assert given not in scope
            found.add(scope)
        assert compared == [(32, 32)] * 5
        if known:  # KV on the disk is shared within it, also when keys have come and gone
            assert others.scope("/v1/models", [f"Bearer {given}"]) == scope


class Loading:
    """A model that does not come; or ``engine``, at once."""

    def __init__(self, engine: AsyncEngine | None = None) -> None:
        self.engine = engine

    def names(self) -> list[str]:
        return ["slow"]

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AsyncEngine]:
        if self.engine is None:
            await asyncio.Event().wait()
        assert self.engine is not None
        yield self.engine

    async def unload(self, name: str) -> bool:
        return False

    def state(self) -> dict[str, dict[str, Any]]:
        return {"slow": {"state": "loading"}}

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.__aexit__(None, None, None)


@pytest.mark.parametrize("prepared", [False, True])
def test_who_has_not_begun_when_the_server_ends_is_told(tiny: Tiny, prepared: bool) -> None:
    """Its model is still being loaded, or its prompt prepared."""

    async def scenario() -> None:
        models = Loading(AsyncEngine(engine(tiny)) if prepared else None)
        service = Service(models, ServerSettings(drain=0.05), fingerprint=lambda its: "test")
        preparing, go_on = threading.Event(), threading.Event()

        def work(model: Any) -> Work:
            preparing.set()
            assert go_on.wait(30)
            return Work(prompts=[np.array([5, 6], np.int32)], params=SamplingParams(max_tokens=5))

        waiting = asyncio.create_task(service.begin("slow", work, Caller("x", "y")))
        while not service.inside or (prepared and not preparing.is_set()):
            await asyncio.sleep(0.002)
        draining = asyncio.create_task(service.drain())
        while not service._refusing:
            await asyncio.sleep(0.002)
        go_on.set()
        with pytest.raises(APIError) as told:
            await waiting
        assert (told.value.status, told.value.code) == (503, "shutting_down")
        await draining
        assert service.inside == 0
        with pytest.raises(APIError):
            await service.begin("slow", work, Caller("x", "y"))
        await service.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_steps_that_fail_make_it_unready_and_one_that_does_not_ready_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any) -> None:
        raise RuntimeError("no step works")

    with serving(engine(tiny), name="tiny") as running:
        for _ in range(2):
            assert running.http.get("/ready").status_code == 200
            with monkeypatch.context() as patched:
                patched.setattr(Engine, "step", broken)
                for _ in range(2):
                    assert running.post("/v1/completions", SHORT).status_code == 500
            unready = running.http.get("/ready")
            assert (unready.status_code, unready.json()["error"]["code"]) == (503, "engine_failing")
            ask(running, SHORT)


def test_nobody_waits_for_an_engine_whose_thread_has_ended(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that ran, nor those that came in its last step, nor those that come later."""
    running_step, go_on = threading.Event(), threading.Event()

    def dying(self: Any) -> None:
        running_step.set()
        assert go_on.wait(30)
        raise SystemExit("out of the thread")

    with serving(engine(tiny), name="tiny") as running, ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(Engine, "step", dying)
        first = threads.submit(running.post, "/v1/completions", SHORT)
        assert running_step.wait(30)
        second = threads.submit(running.post, "/v1/completions", SHORT)
        while running.service.inside < 2:
            time.sleep(0.002)
        go_on.set()
        assert first.result(30).status_code == 500
        assert second.result(30).status_code in (500, 503), second.result().text
        later = running.post("/v1/completions", SHORT)
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_stopped")
        unready = running.http.get("/ready")
        assert (unready.status_code, unready.json()["error"]["code"]) == (503, "engine_stopped")
        assert running.http.get("/health").status_code == 200


KEYS = ("first-secret-key", "second-secret-key")


@pytest.mark.parametrize("keys", [KEYS, ()], ids=["keys", "addresses"])
def test_a_flood_whatever_its_priority_holds_up_another_by_a_step_or_two(tiny: Tiny, keys: tuple[str, ...]) -> None:
    """One has every row for answers without end, and a queue; another's answer of one token is there while none of
    those has ended, within two steps of its own. Keys tell who is who, or else addresses."""
    flood, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.1" if keys else "127.0.0.2")
    steps: list[set[int]] = []
    with serving(engine(tiny, max_rows=3), name="tiny", api_keys=keys, queue=30) as running, ExitStack() as held:
        endless = {**LONG, "stream": True, "priority": 2**31 - 1}
        for _ in range(9):
            stream = held.enter_context(running.http.stream("POST", "/v1/completions", json=endless, headers=flood))
            assert stream.status_code == 200
        running.on_step(lambda record: steps.append(set(record.requests)))
        client = held.enter_context(httpx.Client(base_url=running.url, transport=elsewhere, timeout=120, headers=other))
        for _ in range(3):
            assert client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200
        running.on_step(None)
        own = [step for step in steps if max(step) >= 9]
        assert len(own) <= 2 * 3
        assert running.call(running.engine.ask(lambda its: its.stats.requests)) == 3


@pytest.mark.parametrize(("host", "most", "code"), [("0.0.0.0", 4, "queue_share"), ("127.0.0.1", 8, "queue_full")])
def test_without_keys_addresses_share_the_places_unless_only_this_machine_asks(
    tiny: Tiny, host: str, most: int, code: str
) -> None:
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    with serving(engine(tiny, max_rows=2), name="tiny", host=host, queue=6) as running, ExitStack() as held:
        for _ in range(most):
            stream = held.enter_context(running.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}))
            assert stream.status_code == 200
        refused = running.answer("/v1/completions", SHORT, 429)["error"]
        assert refused["code"] == code
        assert ("this address has its share" in refused["message"]) == (code == "queue_share")
        client = held.enter_context(httpx.Client(base_url=running.url, transport=elsewhere, timeout=120))
        assert client.post("/v1/completions", json=SHORT).status_code == (200 if code == "queue_share" else 429)


def test_a_flood_of_long_prompts_holds_up_anothers_chat_by_a_step_or_two(tiny: Tiny) -> None:
    """Of one key's prompts each takes 25 steps; another's chat is read beside the first of them, not after the last."""
    flood, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    steps, go_on = list[set[int]](), threading.Event()

    def seen(record: Any) -> None:
        steps.append(set(record.requests))
        assert go_on.wait(60)
        time.sleep(0.005)

    def until_inside(running: Running, count: int) -> None:
        while (known := running.service.known("tiny")) is None or known.admission.inside < count:
            time.sleep(0.002)

    with (
        serving(engine(tiny, max_rows=8, prefill_chunk=32), name="tiny", api_keys=KEYS) as running,
        ThreadPoolExecutor(7) as threads,
    ):
        running.on_step(seen)
        prompts = [{**SHORT, "prompt": f"{i} and so on " * 100, "max_tokens": 1} for i in range(6)]
        asked = [threads.submit(running.post, "/v1/completions", prompt, **flood) for prompt in prompts]
        until_inside(running, 6)
        brief = {**LONG, "prompt": "a b c d e", "max_tokens": 1}
        asked.append(threads.submit(running.post, "/v1/completions", brief, **other))
        until_inside(running, 7)
        go_on.set()
        assert [each.result(60).status_code for each in asked] == [200] * 7
        running.on_step(None)
    one, count = min(Counter(each for step in steps for each in step).items(), key=lambda found: found[1])
    last = max(at for at, step in enumerate(steps) if one in step)
    assert count <= 2
    assert len(set.union(*steps[last + 1 :])) >= 4  # of the flood, whose answers came later
