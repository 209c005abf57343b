"""AsyncEngine: an engine in its own thread behind an inbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any

from outpace.engine.engine import Engine
from outpace.engine.results import Delta, Result
from outpace.engine.statistics import Stats
from outpace.errors import OutpaceError
from outpace.params import Prompt, SamplingParams

log = logging.getLogger(__name__)

_Receive = Callable[[Delta | BaseException], None]


class AsyncEngine:
    """Serves requests from any number of asyncio tasks (and threads). The engine itself lives in one thread.

    ``add`` and ``cancel`` take effect between steps. Closing a stream cancels its request. A step that fails leaves
    everything as it was, so it is tried once more; if that fails too, every request gets the error, and the engine goes
    on with the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._receivers: dict[int, _Receive] = {}  # touched by the engine's thread alone
        self._failing = False  # the last step failed
        self._closed = False
        self._lock = threading.Lock()  # no job may slip in behind the last one, where nobody would ever run it
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    @classmethod
    async def load(cls, model: str = "demo", **options: Any) -> AsyncEngine:
        """``Engine.load`` off the event loop."""
        return cls(await asyncio.to_thread(lambda: Engine.load(model, **options)))

    @property
    def engine(self) -> Engine:
        """The engine, for what never changes (``model.info``, ``tokenizer``); its methods belong to its thread."""
        return self._engine

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Deltas of one request as they come. Options as in ``Engine.add``; raises what it raises."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        def receive(item: Delta | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(deltas.put_nowait, item)

        def add() -> int:
            request = self._engine.add(prompt, params, **options)
            self._receivers[request] = receive
            return request

        adding = asyncio.wrap_future(self._call(add))
        try:
            request = await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._cancel_added)
            raise
        left = (params or SamplingParams()).n
        try:
            while left:
                item = await deltas.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.result is not None
                yield item
        finally:
            self._cancel(request)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> list[Result]:
        """Run one request to its end; one result a sample."""
        results = [delta.result async for delta in self.stream(prompt, params, **options) if delta.result is not None]
        return sorted(results, key=lambda result: result.sample)

    async def stats(self) -> Stats:
        """Pooled over the requests that have ended."""
        return await asyncio.wrap_future(self._call(lambda: self._engine.stats))

    def close(self) -> None:
        """End what runs (its streams raise OutpaceError), stop the thread and close the engine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

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
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closed:
                raise OutpaceError("this engine is closed: make a new one")
            self._inbox.put(run)
        return future

    def _cancel_added(self, adding: asyncio.Future[int]) -> None:
        if adding.exception() is None:
            self._cancel(adding.result())

    def _cancel(self, request: int) -> None:
        """Forget a request, between steps; one that is over has nothing left to end."""

        def cancel() -> None:
            self._receivers.pop(request, None)
            self._engine.cancel(request)

        self._inbox.put(cancel)

    def _run(self) -> None:
        while True:
            try:
                job = self._inbox.get(block=self._engine.idle)
            except queue.Empty:
                self._step()
                continue
            if job is None:
                break
            self._guarded(job)
        self._fail(OutpaceError("the engine was closed while this request ran"))
        self._guarded(self._engine.close)

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
            if self._failing:
                self._fail(error)
            self._failing = not self._failing
            return
        self._failing = False
        for delta in deltas:
            receive = self._receivers.get(delta.request)
            if receive is not None:
                receive(delta)

    def _fail(self, error: BaseException) -> None:
        """Every request that runs gets ``error`` and ends."""
        for request, receive in list(self._receivers.items()):
            self._guarded(partial(self._engine.cancel, request))
            receive(error)
        self._receivers.clear()
