"""AsyncEngine: an engine in its own thread behind an inbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from outpace.common.arrays import I32
from outpace.drafters.base import DrafterSource
from outpace.engine.engine import Collected, Engine, Snapshot, bar, checked_errors, prepared_many, prepared_one
from outpace.engine.request import Request
from outpace.engine.results import Delta, Errors, Result, joined
from outpace.engine.sequence import Prepared
from outpace.engine.statistics import Stats
from outpace.errors import OutpaceError
from outpace.params import Prompt, SamplingParams

if TYPE_CHECKING:
    from outpace.engine.request import EngineLoadKeywords, RequestKeywords


class Watch:
    """Calls ``late`` in the loop whenever ``seconds`` have passed since ``begin``, unless ``end`` came first. There is
    one timer, set anew only when it fires."""

    def __init__(self, seconds: float, late: Callable[[], object]) -> None:
        self.seconds, self._late = seconds, late
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(seconds, self._fire)

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def close(self) -> None:
        """It calls nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        left = self.seconds
        if self._since is not None:
            left += self._since - self._loop.time()
            if left <= 0:
                self._late()
                self.begin()
                left = self.seconds
        if self._timer is not None:
            self._timer = self._loop.call_later(left, self._fire)


log = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncEngine:
    """``Engine`` for any number of asyncio tasks (and threads): the same methods, awaited. One thread runs the engine's
    steps; ``ask`` reaches what else an engine has.

    Requests begin and end between steps. Closing a stream cancels its request. A step that fails leaves
    everything as it was, so it is tried once more; if that fails too, every request gets the error, and the engine goes
    on with the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[int, Running] = {}  # by request; touched by the engine's thread alone
        self.failures = 0  # steps that have failed since the last that did not
        self.failed_at = 0.0  # when the last one did, by time.monotonic
        self._closed = self._ended = False  # nothing new is taken; the thread does nothing any more
        self._lock = threading.Lock()  # no job may slip in behind the last one, where nobody would ever run it
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def load(
        cls,
        model: Any = "demo",
        *,
        drafter: DrafterSource | None = "auto",
        drafters: Sequence[DrafterSource] = (),
        tokenizer: Any = None,
        **options: Unpack[EngineLoadKeywords],
    ) -> AsyncEngine:
        """``Engine.load`` off the event loop, with the same arguments and errors."""
        load = partial(Engine.load, model, drafter=drafter, drafters=drafters, tokenizer=tokenizer, **options)
        return cls(await asyncio.to_thread(load))

    @property
    def engine(self) -> Engine:
        """The engine. Other threads may call its ``generate`` and ``stream``, but not ``step``, which would take deltas
        of these requests."""
        return self._engine

    @property
    def alive(self) -> bool:
        """Whether its thread runs, and takes requests or has yet to end those that it took."""
        return self._thread.is_alive() and not self._ended

    async def encode(self, prompt: Prompt, *, raw: bool = False, add_special_tokens: bool = True) -> I32:
        """``Engine.encode`` off the event loop, with the same arguments and errors."""
        return await asyncio.to_thread(self._engine.encode, prompt, raw=raw, add_special_tokens=add_special_tokens)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        errors: Errors = "raise",
        **options: Unpack[RequestKeywords],
    ) -> AsyncIterator[Delta]:
        """``Engine.stream``: deltas of one request as they come, with the same arguments and errors."""
        raises = checked_errors(errors)
        prepared = await asyncio.to_thread(self._engine.prepare, prompt, params, **options)
        async with contextlib.aclosing(await self.open([prepared])) as running:
            while running.left:
                for delta in await running.get():
                    yield delta
                    if delta.result is not None and raises:
                        delta.result.raise_for_error()

    async def open(self, requests: Sequence[Prepared]) -> Running:
        """Queue ``requests`` together, between two steps. Whoever opens what it returns closes it."""
        running = Running(self, requests)
        adding = asyncio.wrap_future(self._call(running.begin))
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(running.abandon)
            raise
        return running

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        errors: Errors = "raise",
        **options: Unpack[RequestKeywords],
    ) -> Result:
        """``Engine.generate``: run one request with one sample to its end, with the same arguments and errors."""
        prepared = await asyncio.to_thread(prepared_one, self._engine.prepare, prompt, params, options)
        return (await self._collected([prepared], errors, False))[0]

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Errors = "raise",
        progress: bool | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Result]:
        """``Engine.generate_many``: results in the order of the prompts, with the same arguments and errors."""
        prepared = await asyncio.to_thread(prepared_many, self._engine.prepare, prompts, params, options)
        return await self._collected(prepared, errors, progress)

    async def _collected(self, requests: Sequence[Prepared], errors: Errors, progress: bool | None) -> list[Result]:
        with bar(sum(len(prepared.sequences) for prepared in requests), progress) as advance:
            collected = Collected(requests, errors, advance)
            async with contextlib.aclosing(await self.open(requests)) as running:
                while running.left:
                    for delta in await running.get():
                        collected.take(delta)
        return collected.results

    async def cancel(self, request: int) -> list[Delta]:
        """``Engine.cancel``: end a request's samples; its stream gets their last deltas, too."""

        def cancel() -> list[Delta]:
            deltas = self._engine.cancel(request)
            self._deliver(deltas)
            return deltas

        deltas: list[Delta] = await asyncio.wrap_future(self._call(cancel))
        return deltas

    async def request(self, request: int) -> Request:
        """``Engine.request``: what was asked, of a request that runs or waits."""
        return await self.ask(lambda engine: engine.request(request))

    async def snapshot(self) -> Snapshot:
        """``Engine.snapshot``: what runs and waits, and all that was done so far."""
        return await self.ask(Engine.snapshot)

    async def check(self) -> None:
        """``Engine.check``: assert the engine's invariants."""
        await self.ask(Engine.check)

    async def stats(self) -> Stats:
        """Pooled over the requests that have ended."""
        return await self.ask(lambda engine: engine.stats)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """``question(engine)``, called in the engine's thread between two steps: keep it short."""
        answer: T = await asyncio.wrap_future(self._call(lambda: question(self._engine)))
        return answer

    def close(self) -> None:
        """End what runs (its streams raise OutpaceError), stop the thread and close the engine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    def __repr__(self) -> str:
        return f"Async{self._engine!r}"

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` in the engine's thread, between steps."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise OutpaceError("this engine's thread has ended: make a new one")
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise OutpaceError("this engine is closed: make a new one")
            if not self._thread.is_alive():
                raise OutpaceError("this engine's thread is in the process that forked this one: make a new one")
            self._inbox.put(run)
        return future

    def _cancel(self, requests: list[int]) -> None:
        """Forget requests, between steps; those that are over have nothing left to end."""

        def cancel() -> None:
            for request in requests:
                self._running.pop(request, None)
                self._engine.cancel(request)

        self._inbox.put(cancel)

    def _run(self) -> None:
        error: BaseException = OutpaceError("the engine was closed while this request ran")
        try:
            self._serve()
        except BaseException as fault:
            log.critical("the engine's thread ends: every request gets an error from now on", exc_info=fault)
            error = OutpaceError(f"the engine's thread has ended ({fault!r}): make a new one")
        with self._lock:
            self._closed = self._ended = True
        self._fail(error)
        while not self._inbox.empty():
            self._guarded(self._inbox.get() or self._engine.close)  # who waits gets an error
        self._guarded(self._engine.close)

    def _serve(self) -> None:
        while True:
            try:
                job = self._inbox.get(block=self._engine.idle)
            except queue.Empty:
                self._step()
                continue
            if job is None:
                return
            self._guarded(job)

    def _guarded(self, job: Callable[[], Any]) -> None:
        """The thread outlives whatever goes wrong in a job that nobody waits for."""
        try:
            job()
        except Exception:
            log.exception("the engine failed between two steps")

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            self.failures += 1
            self.failed_at = time.monotonic()
            if not self.failures % 2:  # it was tried once more
                self._fail(error)
            return
        self.failures = 0
        self._deliver(deltas)

    def _deliver(self, deltas: list[Delta]) -> None:
        """Deltas go to those who wait for them."""
        whose: dict[Running, list[Delta]] = {}
        for delta in deltas:
            running = self._running.get(delta.request)
            if running is not None:
                whose.setdefault(running, []).append(delta)
        _tell(whose)

    def _fail(self, error: BaseException) -> None:
        """Every request that runs gets ``error`` and ends."""
        whose = set(self._running.values())
        for request in list(self._running):
            self._guarded(partial(self._engine.cancel, request))
        self._running.clear()
        _tell(dict.fromkeys(whose, error))


class Running:
    """Requests that were queued together. One task reads it; ``close`` ends what still runs."""

    def __init__(self, serving: AsyncEngine, requests: Sequence[Prepared]) -> None:
        self._serving, self._requests = serving, list(requests)
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._deltas: list[Delta] = []
        self._error: BaseException | None = None
        self._closed = False
        self._watch: Watch | None = None
        self.left = sum(len(prepared.sequences) for prepared in requests)  # samples whose end was not read yet

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Whose thread reads it."""
        return self._loop

    @property
    def ids(self) -> list[int]:
        """Of the requests, in their order."""
        return [prepared.request.id for prepared in self._requests]

    @property
    def delivered(self) -> list[Delta | None]:
        """Of every sample, in their order: what it was resumed after."""
        return [sequence.delivered for prepared in self._requests for sequence in prepared.sequences]

    @property
    def progress(self) -> tuple[int, int, int]:
        """Of all prompts: their tokens, those of them whose KV was there, and those whose KV is there now."""
        firsts = [prepared.sequences[0] for prepared in self._requests]
        return (
            sum(each.prompt_length for each in firsts),
            sum(min(each.stats.reused_tokens, each.prompt_length) for each in firsts),
            sum(min(each.cached, each.prompt_length) for each in firsts),
        )

    async def get(self, timeout: float | None = None) -> list[Delta]:
        """What has come since the last call, at least one; none when ``timeout`` seconds brought none, or after
        ``wake``.

        What comes while nobody reads is joined into one delta a sample, so that a slow reader costs no more than the
        answer itself. Raises what ended the engine's work.
        """
        if not self._arrived.is_set():
            if timeout is None:
                await self._arrived.wait()
            else:
                await self._patiently(timeout)
        self._arrived.clear()
        deltas, self._deltas = self._deltas, []
        if self._error is not None and not deltas:
            raise self._error
        if self._error is not None:
            self._arrived.set()
        deltas = joined(deltas)
        self.left -= sum(delta.result is not None for delta in deltas)
        return deltas

    async def _patiently(self, timeout: float) -> None:
        if self._watch is None or self._watch.seconds != timeout:
            self._unwatch()
            self._watch = Watch(timeout, self.wake)
        self._watch.begin()
        try:
            await self._arrived.wait()
        finally:
            self._watch.end()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def wake(self) -> None:
        """Let ``get`` return now; in the loop's thread."""
        self._arrived.set()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs, before the engine's next step. Calling twice is allowed."""
        if not self._closed:
            self._closed = True
            self._unwatch()
            self._serving._cancel(self.ids)

    def abandon(self, adding: asyncio.Future[None]) -> None:
        """Whoever asked is gone, and so is whoever would have heard that it failed."""
        if adding.exception() is None:
            self.close()

    def begin(self) -> None:
        """In the engine's thread."""
        engine = self._serving.engine
        begun: list[int] = []
        try:
            begun.extend(engine.submit(prepared) for prepared in self._requests)
        except BaseException:
            for request in begun:
                engine.cancel(request)
            raise
        for request in begun:
            self._serving._running[request] = self

    def receive(self, what: list[Delta] | BaseException) -> None:
        """In the loop's thread."""
        if isinstance(what, BaseException):
            self._error = what
        else:
            self._deltas.extend(what)
        self._arrived.set()


def _tell(what: Mapping[Running, list[Delta] | BaseException]) -> None:
    """In the engine's thread: a loop is woken once for all that a step has for it. Every wake-up gives up the
    interpreter, which the loop then keeps while the engine waits."""
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Running, list[Delta] | BaseException]]] = {}
    for running, outcome in what.items():
        loops.setdefault(running.loop, []).append((running, outcome))
    for loop, changes in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(_receive, changes)


def _receive(changes: Sequence[tuple[Running, list[Delta] | BaseException]]) -> None:
    for running, outcome in changes:
        running.receive(outcome)
