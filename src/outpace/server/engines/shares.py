"""What API keys share beside the engine: threads that prepare requests and write answers; places of large bodies."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

KEY: ContextVar[str] = ContextVar("outpace_key", default="")  # whose request is served: an API key's, or an address's

_THREADS = 4  # for templates, tokens, grammars and large JSON


class Shares:
    """So many ``places``, of which one key has at most ``each``. Keys that wait take turns."""

    def __init__(self, places: int, each: int) -> None:
        self._free, self._each = places, each
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by key, the one whose turn is next first

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a place."""
        return any(not each.done() for waiting in self._waiting.values() for each in waiting)

    async def take(self) -> Callable[[], None]:
        """Wait for a place of the key in ``KEY``; what gives it back, called once."""
        key, coming = KEY.get(), asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(coming)
        self._go_on()
        try:
            await coming
        except asyncio.CancelledError:
            if not coming.cancelled():
                self._give(key)
            raise
        return lambda: self._give(key)

    def _give(self, key: str) -> None:
        self._free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]  # keys may be addresses, of which there are many
        self._go_on()

    def _go_on(self) -> None:
        while self._free:
            key = next((key for key in self._waiting if self._held[key] < self._each), None)
            if key is None:
                return
            waiting = self._waiting.pop(key)
            coming = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting  # behind the others
            if not coming.cancelled():
                self._free -= 1
                self._held[key] += 1
                coming.set_result(None)


class Workers:
    """Threads. ``shared``: there are several API keys; then one has at most half of the processor's cores."""

    def __init__(self, *, shared: bool) -> None:
        each = max(min(_THREADS, os.cpu_count() or 1) // 2, 1) if shared else _THREADS
        self._shares = Shares(_THREADS, each)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="outpace-request")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function`` in a thread, when it is its key's turn. Its place is taken until it has ended, even where nobody
        waits for it any more."""
        give, loop = await self._shares.take(), asyncio.get_running_loop()

        def done(job: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(give)

        job = self._threads.submit(function, *arguments)
        job.add_done_callback(done)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
