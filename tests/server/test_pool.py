"""Several models in bounded memory: loaded once however many wait, unloaded when idle, never while in use."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest

from outpace import SamplingParams
from outpace.engine.aio import AsyncEngine
from outpace.errors import MemoryLimitError, ModelError, OutpaceError, ParameterError
from outpace.server.engines.pool import Pool, PooledModel, pooled
from tests.native.native_helpers import Tiny


class House:
    """Models that take memory and nothing else. ``gate``: while closed, loads do not end."""

    def __init__(self) -> None:
        self.inside: dict[str, int] = {}
        self.most = 0
        self.loads: list[str] = []
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def model(self, name: str, size: int) -> PooledModel:
        house = self

        class Engine:
            def close(self) -> None:
                with house._lock:
                    del house.inside[name]

        def load() -> Any:
            assert house.gate.wait(10)
            with house._lock:
                house.loads.append(name)
                if name in house.broken:
                    raise ModelError(f"{name} is broken")
                assert name not in house.inside
                house.inside[name] = size
                house.most = max(house.most, sum(house.inside.values()))
            return Engine()

        return PooledModel(name, load, lambda: size)

    def pool(self, memory: int | None = 10, **sizes: int) -> Pool:
        clock = iter(range(10**9))
        models = [self.model(name, size) for name, size in sizes.items()]
        return Pool(models, memory=memory, patience=1e6, now=lambda: float(next(clock)))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


async def use(pool: Pool, name: str) -> None:
    async with pool.lease(name):
        assert pool.state()[name]["leases"]


async def until(pool: Pool, name: str, state: str) -> None:
    while pool.state()[name]["state"] != state:
        await asyncio.sleep(0.002)


def test_the_least_recently_used_idle_model_goes() -> None:
    house = House()

    async def scenario() -> None:
        pool = house.pool(a=5, b=5, c=5)
        assert pool.names() == ["a", "b", "c"]
        for name in "abac":
            await use(pool, name)
        assert house.inside.keys() == {"a", "c"}
        assert house.loads == ["a", "b", "c"]
        async with pool.lease("a"):  # the least recently used, and in use
            await use(pool, "b")
            assert house.inside.keys() == {"a", "b"}
        await pool.close()
        assert not house.inside
        assert house.most <= 10

    run(scenario())


def test_a_model_is_unloaded_when_it_is_asked_for_and_nobody_uses_it() -> None:
    house = House()

    async def scenario() -> None:
        pool = house.pool(a=5, b=5)
        assert await pool.unload("a")  # it was never there
        async with pool.lease("a"):
            assert not await pool.unload("a")
        assert house.inside.keys() == {"a"}
        assert await pool.unload("a")
        assert not house.inside
        await use(pool, "a")
        assert house.loads == ["a", "a"]
        await pool.close()

    run(scenario())


def test_many_that_wait_share_one_load_off_the_loop() -> None:
    house = House()
    house.gate.clear()

    async def scenario() -> None:
        pool = house.pool(a=5)
        waiting = [asyncio.create_task(use(pool, "a")) for _ in range(20)]
        await until(pool, "a", "loading")  # the loop runs on
        assert pool.state()["a"]["waiting"] == 20
        waiting[0].cancel()
        house.gate.set()
        await asyncio.gather(*waiting[1:])
        assert house.loads == ["a"]
        assert pool.state()["a"] == {"state": "loaded", "leases": 0, "waiting": 0, "bytes": 5, "error": None}
        await pool.close()

    run(scenario())


def test_a_model_that_is_always_busy_makes_way() -> None:
    house = House()

    async def scenario() -> None:
        pool = house.pool(a=6, b=6)
        async with AsyncExitStack() as held:
            await held.enter_async_context(pool.lease("a"))
            other = asyncio.create_task(use(pool, "b"))
            await until(pool, "a", "leaving")
            late = asyncio.create_task(use(pool, "a"))  # not before b had its turn
            await asyncio.sleep(0.02)
            assert not other.done()
            assert not late.done()
        await asyncio.gather(other, late)
        assert house.loads == ["a", "b", "a"]
        await pool.close()

    run(scenario())


def test_who_gives_up_waiting_lets_the_busy_one_stay() -> None:
    house = House()

    async def scenario() -> None:
        pool = house.pool(a=6, b=6)
        async with pool.lease("a"):
            other = asyncio.create_task(use(pool, "b"))
            await until(pool, "a", "leaving")
            other.cancel()
            await until(pool, "a", "loaded")
            await use(pool, "a")
        assert house.loads == ["a"]
        await pool.close()

    run(scenario())


def test_failures_are_told_and_tried_again_later() -> None:
    house = House()
    house.broken.add("a")
    now = [0.0]

    async def scenario() -> None:
        pool = Pool([house.model("a", 5), house.model("big", 50)], memory=10, patience=10, now=lambda: now[0])
        told = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in told] == ["a is broken"] * 3
        with pytest.raises(ModelError):
            await use(pool, "a")
        assert house.loads == ["a"], "it was tried again at once"
        assert pool.state()["a"]["error"] == "a is broken"
        house.broken.clear()
        now[0] = 11
        await use(pool, "a")
        assert pool.state()["a"]["error"] is None
        with pytest.raises(MemoryLimitError, match=r"big takes 50 B.*raise the bound"):
            await use(pool, "big")
        with pytest.raises(ParameterError, match="use a, big"):
            await use(pool, "c")
        await pool.close()

    run(scenario())
    with pytest.raises(ParameterError, match="twice"):
        Pool([house.model("a", 1)] * 2, memory=10)


def test_closing_ends_waiting_and_loading() -> None:
    house = House()

    async def scenario() -> None:
        pool = house.pool(a=6, b=6, c=4)
        async with pool.lease("a"):
            house.gate.clear()
            waiting = [asyncio.create_task(use(pool, name)) for name in "bc"]
            await until(pool, "c", "loading")
            await until(pool, "a", "leaving")
            closing = asyncio.create_task(pool.close())
            for task in waiting[:1]:
                with pytest.raises(OutpaceError, match="shutting down"):
                    await task
            house.gate.set()
            await closing
        with pytest.raises(OutpaceError):
            await waiting[1]
        assert not house.inside
        await pool.close()

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_stays_within_memory_and_everybody_is_served(seed: int) -> None:
    house, rng = House(), random.Random(seed)

    async def scenario() -> None:
        pool = house.pool(a=3, b=4, c=5, d=9)
        served = 0

        async def client() -> None:
            nonlocal served
            for _ in range(8):
                name = rng.choice("abcd")
                async with pool.lease(name):
                    assert name in house.inside
                    await asyncio.sleep(rng.random() * 0.002)
                    assert name in house.inside, "unloaded while in use"
                served += 1

        tasks = [asyncio.create_task(client()) for _ in range(12)]
        gone = rng.sample(tasks, 2)
        await asyncio.sleep(0.005)
        for task in gone:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task for task in tasks if not task.cancelled() and task.exception()] == []
        assert served >= 80
        assert house.most <= 10
        assert all(its["leases"] == its["waiting"] == 0 for its in pool.state().values())
        await pool.close()
        assert not house.inside

    run(scenario())


def test_two_real_models_in_the_memory_of_one() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    async def said(engine: AsyncEngine) -> tuple[int, ...]:
        return (await engine.generate([5, 6, 7], params)).token_ids

    async def scenario() -> None:
        with Tiny() as tiny:
            paths = {
                name: tiny.path("Q8_0", layers=layers, tokenizer=1, vocab=180) for name, layers in (("a", 1), ("b", 2))
            }
            models = [pooled(n, str(path), kv_memory=1 << 20, drafter="ngram") for n, path in paths.items()]
            alone = {}
            for model in models:
                async with model.load() as engine:
                    alone[model.name] = await said(engine)
            pool = Pool(models, memory=max(model.bytes() for model in models))
            for name in "abba":
                async with pool.lease(name) as engine:
                    assert await said(engine) == alone[name]
            assert sum(its["state"] == "loaded" for its in pool.state().values()) == 1
            await pool.close()

    run(scenario())
