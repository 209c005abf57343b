"""Several threads use one engine, or several engines over one model: right answers or a clear error, nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from native_helpers import Tiny

from outpace import AsyncEngine, Engine, OutpaceError, Result, SamplingParams
from outpace.drafters.base import Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.learned.drafter import LearnedDrafter
from outpace.drafters.learned.native import NativeEagle
from outpace.drafters.lookup.recycling import RecyclingDrafter
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.engine.results import Delta
from tests.eagles import random as random_eagle
from tests.toy import ToyModel

SANITIZED = os.environ.get("OUTPACE_SANITIZED", "")
THREADS = 8
OPERATIONS = int(os.environ.get("OUTPACE_THREADS_OPERATIONS", "24"))  # of each thread
VOCAB = 100


class Asked(NamedTuple):
    """A request, and what plain decoding answers in one thread."""

    prompt: list[int]
    params: SamplingParams
    tokens: tuple[int, ...]


def asked(model: Any, count: int = 10) -> list[Asked]:
    """Requests without a choice that another order of sums could change."""
    found: list[Asked] = []
    draw = random.Random(1)
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, model, "close", model.close)
        model.close = lambda: None
        engine = undo.enter_context(Engine(model, drafter=None, prefix_rows=0))
        for seed in range(10 * count):
            period = [draw.randrange(90) for _ in range(draw.randint(1, 6))]
            prompt = (period * 12)[: draw.randint(2, 40)]
            temperature = draw.choice((0.0, 0.0, 0.3, 1.0))
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=draw.randint(1, 14), ignore_eos=True)
            result = engine.generate(prompt, params)
            if not result.stats.near_ties:
                found.append(Asked(prompt, params, result.token_ids))
            if len(found) == count:
                return found
    raise AssertionError("too many near ties")


class Users:
    """Threads that do everything at random. Faults of any thread end the test."""

    def __init__(self, engine: Engine, pool: list[Asked], seed: int) -> None:
        self.engine, self.pool, self.seed = engine, pool, seed
        self.answers: dict[int, list[int]] = {}  # of requests that were added; deltas reach whichever thread steps
        self.added: dict[int, Asked] = {}
        self.cancelled: set[int] = set()
        self.refused = 0

    def run(self, operations: int, closes: bool = False) -> None:
        self.closes = closes
        with ThreadPoolExecutor(THREADS) as threads:
            for thread in [threads.submit(self.use, i, operations) for i in range(THREADS)]:
                thread.result()

    def use(self, thread: int, operations: int) -> None:
        draw = random.Random(100 * self.seed + thread)
        kinds: list[Callable[[random.Random], None]] = [
            self.generate, self.generate, self.many, self.stream, self.stream, self.leave, self.cancel, self.add,
            self.ask, self.abandon,
        ]  # fmt: skip
        for operation in range(operations):
            if self.closes and thread == 0 and operation == operations // 2:
                self.engine.close()
            try:
                draw.choice(kinds)(draw)
            except OutpaceError as error:
                if not self.closes or "closed" not in str(error):
                    raise
                self.refused += 1

    def generate(self, draw: random.Random) -> None:
        one = draw.choice(self.pool)
        self.same(self.engine.generate(one.prompt, one.params), one)

    def many(self, draw: random.Random) -> None:
        some = draw.sample(self.pool, 3)
        results = self.engine.generate_many([one.prompt for one in some], [one.params for one in some])
        for result, one in zip(results, some, strict=True):
            self.same(result, one)

    def same(self, result: Result, one: Asked) -> None:
        assert (result.token_ids, result.finish_reason) == (one.tokens, "length")

    def stream(self, draw: random.Random) -> None:
        one = draw.choice(self.pool)
        tokens = [token for delta in self.engine.stream(one.prompt, one.params) for token in delta.token_ids]
        assert tuple(tokens) == one.tokens

    def leave(self, draw: random.Random) -> None:
        """A stream that is closed early."""
        one = draw.choice(self.pool)
        with contextlib.closing(self.engine.stream(one.prompt, one.params)) as stream:
            delta = next(stream)
            assert delta.token_ids == one.tokens[: len(delta.token_ids)]

    def abandon(self, draw: random.Random) -> None:
        """One that only the garbage collector closes, in whatever thread, in whatever call."""
        one = draw.choice(self.pool)
        ring: list[Any] = [self.engine.stream(one.prompt, one.params)]
        ring.append(ring)
        next(ring[0])
        if draw.random() < 0.5:
            del ring
            gc.collect(1)

    def cancel(self, draw: random.Random) -> None:
        one = draw.choice(self.pool)
        stream = self.engine.stream(one.prompt, one.params)
        deltas = [next(stream)]
        ended = self.engine.cancel(deltas[0].request)
        deltas += stream
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tuple(tokens) == one.tokens[: len(tokens)]
        assert deltas[-1].finish_reason == ("cancelled" if ended else "length") or self.closes

    def add(self, draw: random.Random) -> None:
        """A request whose deltas come to whoever steps; now and then, another thread cancels one."""
        one = draw.choice(self.pool)
        with self.engine._lock:  # nobody steps before it is known
            request = self.engine.add(one.prompt, one.params)
            self.added[request], self.answers[request] = one, []
        if draw.random() < 0.3:
            request = draw.choice(list(self.added))
            self.take(self.engine.cancel(request))
        else:
            self.take(self.engine.step())

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.answers[delta.request].extend(delta.token_ids)
            if delta.finish_reason in ("cancelled", "error"):
                self.cancelled.add(delta.request)

    def ask(self, draw: random.Random) -> None:
        engine = self.engine
        if not self.closes:
            engine.snapshot()
            engine.check()
        assert engine.stats.requests >= 0
        assert repr(engine)
        engine.on_step = (lambda record: None) if draw.random() < 0.5 else None
        with contextlib.suppress(OutpaceError):
            engine.request(draw.randrange(50))
        assert engine.idle in (True, False)

    def finish(self) -> None:
        """Whatever was added ends with its tokens, and nothing is left of anybody."""
        gc.collect()
        engine = self.engine
        while not engine.idle:
            self.take(engine.step())
        if not engine._closed:
            engine.check()
        for request, tokens in self.answers.items():
            expected = self.added[request].tokens
            assert tuple(tokens) == (expected[: len(tokens)] if request in self.cancelled else expected)
        assert not engine._mailboxes
        assert not engine._later
        assert not engine._core.requests


def eagle(model: Any, tiny: Tiny) -> Drafter:
    checkpoint = random_eagle(model, range(VOCAB), (0, 1, 0))
    return LearnedDrafter(NativeEagle(model, checkpoint, dtype="float32"), (0, 1, 0), "eagle", VOCAB)


def draft_model(model: Any, tiny: Tiny) -> Drafter:
    """One that computes on the target's threads, between its forwards."""
    return ModelDrafter(tiny.load("F32", runtime=model.runtime, max_length=256), "model", VOCAB)


def lookups() -> Drafter:
    return ComposedDrafter([SuffixDrafter(history=True, memory=1 << 20), RecyclingDrafter()])


NATIVE: dict[str, Callable[[Any, Tiny], Drafter | None]] = {
    "none": lambda model, tiny: None,
    "lookups": lambda model, tiny: lookups(),
    "eagle": eagle,
    "model": draft_model,
}


@pytest.mark.parametrize("drafter", NATIVE)
def test_threads_share_an_engine(drafter: str, tiny: Tiny) -> None:
    model = tiny.load("Q8_0", threads=2, max_length=256)
    pool = asked(model)
    engine = Engine(model, drafter=NATIVE[drafter](model, tiny), size=8, max_rows=5, prefix_rows=2)
    users = Users(engine, pool, seed=len(drafter))
    users.run(OPERATIONS)
    users.finish()
    engine._core.scheduler.close()  # the rows that are kept for prompts that begin alike
    assert (model.kv.rows, model.kv.bytes) == ([], 0)
    for each in engine._all_drafters():
        each.check([])
    users.run(OPERATIONS, closes=True)
    users.finish()
    assert users.refused


@pytest.mark.skipif(bool(SANITIZED), reason="torch is not built with the sanitizer")
def test_threads_share_an_engine_on_torch() -> None:
    from outpace.models.torch.model import TransformersModel
    from tests.integration.test_architectures import tiny as module

    model = TransformersModel(module("llama"), name="m", longest=256)
    pool = asked(model)
    engine = Engine(model, drafter=lookups(), size=8, max_rows=5, prefix_rows=0)
    users = Users(engine, pool, seed=1)
    users.run(OPERATIONS // 3)
    users.finish()
    assert (model.kv.rows, model.kv.bytes) == ([], 0)
    users.run(OPERATIONS // 3, closes=True)
    users.finish()
    assert users.refused


def test_engines_over_one_model_share_its_lock(tiny: Tiny) -> None:
    """Each has a drafter of its own; their rows lie in one cache."""
    model = tiny.load("Q8_0", threads=2, max_length=256)
    pool = asked(model)
    drafters = [None, lookups(), eagle(model, tiny), draft_model(model, tiny)]
    users = [Users(Engine(model, drafter=each, size=6, prefix_rows=0), pool, i) for i, each in enumerate(drafters)]
    for one in users:
        one.engine.check = lambda: None  # type: ignore[method-assign]  # it would find others' rows
    with ThreadPoolExecutor(len(users)) as threads:
        for thread in [threads.submit(one.run, OPERATIONS // 4) for one in users]:
            thread.result()
    for one in users:
        one.finish()
    assert (model.kv.rows, model.kv.bytes) == ([], 0)
    for one in users:
        one.engine.close()


def test_threads_and_tasks_share_an_engine() -> None:
    expected = {}
    with Engine(ToyModel(6, max_length=400)) as engine:
        for token in range(6):
            expected[token] = engine.generate([token], max_tokens=30, ignore_eos=True).token_ids

    async def serve() -> None:
        async with AsyncEngine(Engine(ToyModel(6, max_length=400))) as serving:

            async def task(token: int) -> None:
                result = await serving.generate([token], max_tokens=30, ignore_eos=True)
                assert result.token_ids == expected[token]

            def thread(token: int) -> None:
                assert serving.engine.generate([token], max_tokens=30, ignore_eos=True).token_ids == expected[token]

            tasks = [task(token) for token in (*range(6), *range(6))]
            await asyncio.gather(*tasks, *(asyncio.to_thread(thread, token) for token in range(6)))
            await serving.check()
            assert (await serving.stats()).requests == 18

    asyncio.run(serve())


# -- who goes next ---------------------------------------------------------------------------------------------------


def test_whoever_waits_goes_before_the_next_step() -> None:
    engine = Engine(ToyModel(6, max_length=400))
    order: list[str] = []

    def question(name: str) -> None:
        with engine._lock:
            order.append(name)

    def on_step(record: Any) -> None:
        order.append("step")
        if record.index in (3, 5):
            waits = threading.Thread(target=question, args=(f"question {record.index}",))
            waits.start()
            while engine._lock._door.acquire(blocking=False):  # until it stands there
                engine._lock._door.release()
                time.sleep(0.001)

    engine.on_step = on_step
    engine.generate([1], max_tokens=12, ignore_eos=True)
    assert [(i, order[i - 1]) for i, name in enumerate(order) if name != "step"] == [(4, "step"), (7, "step")]
    engine.close()


def test_a_slow_reader_holds_up_nobody() -> None:
    with Engine(ToyModel(6, max_length=400)) as engine:
        slow = engine.stream([1], max_tokens=30, ignore_eos=True)
        begun = list(next(slow).token_ids)
        expected = engine.generate([1], max_tokens=30, ignore_eos=True).token_ids
        with ThreadPoolExecutor(2) as threads:
            others = [threads.submit(engine.generate, [1], max_tokens=30, ignore_eos=True) for _ in range(4)]
            assert {other.result().token_ids for other in others} == {expected}
        assert (*begun, *(token for delta in slow for token in delta.token_ids)) == expected


# -- calls from within a step ----------------------------------------------------------------------------------------


def test_listeners_and_rules_may_not_step_and_what_else_they_do_works() -> None:
    engine = Engine(ToyModel(6, max_length=400))
    errors: list[str] = []
    ended: list[Result] = []
    other = engine.add([2], max_tokens=50, ignore_eos=True)
    more: list[int] = []

    def within(record: Any) -> None:
        for call in (
            engine.step, engine.close, lambda: engine.generate([1]), lambda: next(engine.stream([1])),
        ):  # fmt: skip
            with pytest.raises(OutpaceError, match="a step of this engine is under way") as refused:
                call()  # type: ignore[operator]
            errors.append(str(refused.value))
        engine.snapshot()
        engine.check()
        assert repr(engine)
        assert engine.stats.requests >= 0
        if not more:
            assert engine.cancel(other) == []
            more.append(engine.add([3], max_tokens=2, ignore_eos=True))

    def on_result(result: Result) -> None:
        ended.append(result)
        assert engine.cancel(more[0] if more else other) == []

    engine.on_step, engine.on_result = within, on_result
    result = engine.generate([1], max_tokens=5, ignore_eos=True)
    assert len(result.token_ids) == 5
    deltas = []
    while not engine.idle:
        deltas += engine.step()
    assert {d.request: d.finish_reason for d in deltas if d.result} == {other: "cancelled", more[0]: "cancelled"}
    assert len(errors) >= 20
    engine.on_step = engine.on_result = None
    engine.check()

    def rule(tokens: Any, logits: Any) -> None:
        engine.generate([1])

    failed = engine.generate([1], rules=[rule], errors="return")
    assert "a step of this engine is under way" in str(failed.error)
    assert engine.generate([1], max_tokens=5, ignore_eos=True).token_ids == result.token_ids
    assert not engine._core.requests
    engine.close()


# -- interrupts and forks --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals between threads")
def test_streams_that_are_dropped_in_each_others_steps_hang_nobody() -> None:
    """The garbage collector may close a stream of one engine within another's step, in each of two threads."""
    engines = [Engine(ToyModel(6, max_length=400)) for _ in range(2)]
    streams = [engine.stream([1], max_tokens=200, ignore_eos=True) for engine in engines]
    for stream in streams:
        next(stream)
    both = threading.Barrier(2)

    def drop(other: int) -> Any:
        def within(record: Any) -> None:
            engines[1 - other].on_step = None
            both.wait(60)  # both are in a step
            streams[other].close()
            both.wait(60)

        return within

    for i, engine in enumerate(engines):
        engine.on_step = drop(1 - i)
    threads = [threading.Thread(target=engine.generate, args=([2],), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "each waits for the other's lock"
    for engine in engines:
        while not engine.idle:  # a stream that was dropped meanwhile ends at the latest now
            engine.step()
        assert not engine._core.requests
        engine.check()


def test_an_interrupt_while_another_thread_steps() -> None:
    """The thread that waits gets it; the one that steps, and the engine, do not notice."""
    engine = Engine(ToyModel(6, max_length=400))
    main, reached, held = threading.get_ident(), threading.Event(), threading.Event()

    def hold(record: Any) -> None:
        if record.index == 3:
            reached.set()
            held.wait(60)

    engine.on_step = hold
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(engine.generate, [1], max_tokens=20, ignore_eos=True)
        assert reached.wait(60)

        def interrupt() -> None:
            while engine._lock._door.acquire(blocking=False):  # until this test waits there
                engine._lock._door.release()
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)
            held.set()

        threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([2], max_tokens=20, ignore_eos=True)
        assert len(other.result().token_ids) == 20
    engine.check()
    assert not engine._core.requests
    assert len(engine.generate([2], max_tokens=20, ignore_eos=True).token_ids) == 20
    engine.close()


# What a child of os.fork does with an engine that threads of its parent are using.
_FORK = """
    import asyncio, os, sys, threading
    from outpace import AsyncEngine, Engine, OutpaceError
    from outpace.drafters.lookup.suffix import SuffixDrafter
    from outpace.models.native.model import load_native

    engine = Engine(load_native(sys.argv[1], threads=2, max_length=256), drafter=SuffixDrafter(history=True), size=8)
    expected = engine.generate([1, 2, 3], max_tokens=30, ignore_eos=True).token_ids
    serving = AsyncEngine(Engine(load_native(sys.argv[1], threads=1, max_length=256)))
    ended = threading.Event()

    def work():
        while not ended.is_set():
            assert engine.generate([1, 2, 3], max_tokens=30, ignore_eos=True).token_ids == expected

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for _ in range(10):
        child = os.fork()
        if child == 0:
            same = engine.generate([1, 2, 3], max_tokens=30, ignore_eos=True).token_ids == expected
            engine.check()
            engine.close()
            try:
                asyncio.run(serving.generate([1]))
            except OutpaceError as error:
                os._exit(7 if same and "forked this one" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ended.set()
    for worker in workers:
        worker.join()
    engine.check()
    serving.close()
    print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_goes_on_between_two_steps(tiny: Tiny) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORK), str(tiny.path("Q8_0"))],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


# -- below the engine ------------------------------------------------------------------------------------------------


def test_a_native_step_refuses_a_second_thread_while_it_runs(tiny: Tiny) -> None:
    model = tiny.load("Q8_0", threads=2, max_length=256)
    expected = asked(model, 1)[0]
    engine = Engine(model, drafter=eagle(model, tiny), size=8, prefix_rows=0)
    refused, over = threading.Event(), threading.Event()

    def meddle() -> None:
        while not over.is_set():
            try:
                engine._core.rows.decisions()
            except RuntimeError as error:
                if "another thread runs this step" not in str(error):
                    raise
                refused.set()

    with ThreadPoolExecutor(1) as threads:
        meddling = threads.submit(meddle)
        until = time.monotonic() + 120
        while not refused.is_set():
            assert time.monotonic() < until, "no call fell into a forward"
            engine.generate([1, 2, 3] * 80, max_tokens=4, ignore_eos=True)
        assert engine.generate(expected.prompt, expected.params).token_ids == expected.tokens
        over.set()
        meddling.result()
    engine.close()
