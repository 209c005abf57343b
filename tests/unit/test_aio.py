"""AsyncEngine: many streams at once give what single runs give; nothing that goes wrong hangs, leaks or spreads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from outpace import AsyncEngine, Engine, SamplingParams
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.results import Delta
from outpace.engine.sequence import Prepared
from outpace.errors import OutpaceError, ParameterError
from tests.toy import ToyError, ToyModel, ToyTokenizer

LONG = SamplingParams(max_tokens=None, ignore_eos=True, temperature=1.0, seed=1)


def make(**options: Any) -> Engine:
    model = ToyModel(6, max_length=4000, memory=3)
    return Engine(model, ToyTokenizer(), drafter=NgramDrafter(), size=4, **{"prefix_rows": 0, **options})  # type: ignore[arg-type]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))  # far above what a busy machine needs: only what hangs is meant


async def quiet(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing to do, and check that nothing is left."""
    for _ in range(1000):
        await engine.stats()  # goes through the inbox, so what was asked before it has happened
        if engine.engine.idle:
            break
        await asyncio.sleep(0.005)
    assert engine.engine.idle
    engine.engine.check()
    assert engine.engine.model.kv.rows == []
    assert engine._running == {}


def test_concurrent_streams_equal_single_runs() -> None:
    requests = [
        ([i % 6] * (1 + i), SamplingParams(temperature=1.0, seed=i, n=1 + i % 3, max_tokens=5 + i)) for i in range(12)
    ]
    with make() as alone:
        expected = [alone.generate_many([prompt], params) for prompt, params in requests]

    async def scenario() -> None:
        async with AsyncEngine(make(max_rows=4)) as engine:
            found = await asyncio.gather(*(engine.generate_many([prompt], params) for prompt, params in requests))
            assert [[r.token_ids for r in rs] for rs in found] == [[r.token_ids for r in rs] for rs in expected]
            assert (await engine.stats()).requests == sum(params.n for _, params in requests)
            await quiet(engine)

    run(scenario())


def test_closing_a_stream_cancels_its_request() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            async with aclosing(engine.stream([1], LONG)) as stream:
                async for _ in stream:
                    break
            await quiet(engine)

    run(scenario())


def test_a_cancelled_task_cancels_its_request() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            task = asyncio.create_task(engine.generate([1], LONG))
            while engine.engine.idle:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await quiet(engine)

    run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_cancelled_while_its_request_is_being_added(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The engine's thread may be about to add the request: then it must be cancelled all the same."""
    adding, go_on = threading.Event(), threading.Event()
    original = Engine.submit

    def slow(self: Engine, prepared: Prepared) -> int:
        adding.set()
        go_on.wait(10)
        if fails:
            raise ParameterError("no")
        return original(self, prepared)

    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            monkeypatch.setattr(Engine, "submit", slow)
            task = asyncio.create_task(engine.generate([1], LONG))
            await asyncio.to_thread(adding.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            monkeypatch.setattr(Engine, "submit", original)
            go_on.set()
            await asyncio.sleep(0.05)
            await quiet(engine)
            assert (await engine.generate([1], LONG, max_tokens=3)).completion_tokens == 3

    run(scenario())


def test_cancelling_what_waits_for_the_engine_does_not_kill_it() -> None:
    """A metrics page that times out while a step runs: its future is cancelled before the engine can fill it."""

    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            held, go_on = threading.Event(), threading.Event()
            engine._inbox.put(lambda: (held.set(), go_on.wait(10), None)[-1])
            held.wait(10)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(engine.stats(), 0.02)
            go_on.set()
            assert (await engine.generate([1], LONG, max_tokens=3)).completion_tokens == 3

    run(scenario())


def test_errors_of_add_reach_the_caller_alone() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            other = asyncio.create_task(engine.generate([1], LONG.with_(max_tokens=50)))
            with pytest.raises(ParameterError, match="empty"):
                await engine.generate([], LONG)
            with pytest.raises(ParameterError, match="size=9"):
                await engine.generate([1], LONG, size=9)
            assert (await other).completion_tokens == 50

    run(scenario())


def failing(batch: Any) -> Any:
    raise ToyError("the toy was told to fail")


def test_a_step_that_fails_once_is_not_noticed() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            stream = engine.stream([1], LONG.with_(max_tokens=9))
            first = await anext(stream)
            engine.engine.model.fail = "output"  # type: ignore[attr-defined]
            rest = [delta async for delta in stream]
            with make() as alone:
                expected = alone.generate([1], LONG.with_(max_tokens=9)).token_ids
            assert (*first.token_ids, *(t for d in rest for t in d.token_ids)) == expected

    run(scenario())


def test_a_failing_step_reaches_every_running_stream_and_the_engine_goes_on() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make(prefix_rows=1)) as engine:
            streams = [engine.stream([i], LONG) for i in range(3)]
            for stream in streams:
                await anext(stream)
            model: Any = engine.engine.model
            forward, model.forward = model.forward, failing
            for stream in streams:
                with pytest.raises(ToyError):
                    _ = [delta async for delta in stream]
            model.forward = forward
            assert (await engine.generate([1], LONG, max_tokens=9)).completion_tokens == 9
            engine.engine.check()

    run(scenario())


def test_closing_while_requests_run_and_wait() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(make(max_rows=1))
        tasks = [asyncio.create_task(engine.generate([i], LONG)) for i in range(3)]
        while engine.engine.idle:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.close)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, OutpaceError)
            assert "closed" in str(error)
        assert engine.engine.model.kv.rows == []
        with pytest.raises(OutpaceError, match="closed"):
            await engine.generate([1])
        with pytest.raises(OutpaceError, match="closed"):
            await engine.stats()
        engine.close()

    run(scenario())


def test_nothing_hangs_when_closing_races_with_adding() -> None:
    """A request that slips in behind the last job would wait for ever."""

    async def scenario() -> None:
        for delay in range(8):
            engine = AsyncEngine(make())
            closer = threading.Thread(target=lambda e=engine, d=delay: (time.sleep(d * 2e-4), e.close()))
            closer.start()
            while True:
                try:
                    await asyncio.gather(*(engine.stats() for _ in range(5)))
                except OutpaceError:
                    break
            await asyncio.to_thread(closer.join)

    run(scenario())


def test_a_loop_that_is_gone_does_not_stop_the_engine() -> None:
    engine = AsyncEngine(make())
    try:
        heard: list[Delta] = []

        async def leave() -> None:
            stream = engine.stream([1], LONG.with_(max_tokens=300))
            heard.append(await anext(stream))
            engine._cancel = lambda request: None  # type: ignore[method-assign]  # as if the loop had died at once

        asyncio.run(leave())
        del engine._cancel  # type: ignore[method-assign]
        assert asyncio.run(engine.generate([2], LONG, max_tokens=5)).completion_tokens == 5
        assert heard[0].token_ids
    finally:
        engine.close()
