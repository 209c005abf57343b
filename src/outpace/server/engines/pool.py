"""Several models behind one server, loaded when they are asked for and unloaded when others need their memory.

What is in use is never unloaded. Where nothing idle is left to make room with, a load waits; the models that have to go
for it take no new requests meanwhile, so that it gets its turn. All of it belongs to one event loop; loading and
closing run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from outpace.common.units import format_bytes, parse_bytes
from outpace.engine.aio import AsyncEngine
from outpace.errors import Argument, MemoryLimitError, OutpaceError, ParameterError

log = logging.getLogger(__name__)

KV_MEMORY = 512 << 20  # bytes of keys and values that a model may take, by default
PATIENCE = 10.0  # seconds after a failure without another attempt

State = Literal["unloaded", "loading", "loaded", "leaving", "failed"]


@dataclass(frozen=True, slots=True)
class PooledModel:
    """A model that may be loaded. ``bytes``: what it takes once it is, from headers alone; ``load``: loads it. Both
    block, and raise what is wrong with it."""

    name: str
    load: Callable[[], AsyncEngine]
    bytes: Callable[[], int]


def pooled(name: str, model: str, *, kv_memory: int | str = KV_MEMORY, **options: Any) -> PooledModel:
    """``model``, as ``Engine.load`` takes it with ``options``, under ``name``. ``kv_memory`` is counted in full."""
    kv = parse_bytes(kv_memory)

    def load() -> AsyncEngine:
        from outpace.engine.engine import Engine

        return AsyncEngine(Engine.load(model, kv_memory=kv, **options))

    def size() -> int:
        from dataclasses import fields

        from outpace.models.load import estimate
        from outpace.models.options import LoadOptions

        known = {its.name for its in fields(LoadOptions)}
        return estimate(model, LoadOptions(**{k: v for k, v in options.items() if k in known})).weights + kv

    return PooledModel(name, load, size)


@dataclass(slots=True)
class _Entry:
    model: PooledModel
    state: State = "unloaded"
    engine: AsyncEngine | None = None
    bytes: int | None = None  # what it takes, or will; None: not known yet
    leases: int = 0
    waiting: int = 0  # for a lease
    granted: int = 0  # leases of those who waited when it was loaded, and have not woken yet
    used: float = 0.0
    error: Exception | None = None
    failed: float = 0.0  # when
    failures: int = 0
    loading: asyncio.Task[None] | None = None
    wanted_by: set[str] = field(default_factory=set)  # loads that it has to go for

    @property
    def idle(self) -> bool:
        return not self.leases and not self.granted


class Pool:
    """``memory``: bytes that all loaded models may take together; None: no bound. ``now``: a clock in seconds.

    Raises ParameterError for a name that is there twice, and for none at all.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        *,
        memory: int | str | None = None,
        patience: float = PATIENCE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [model.name for model in models]
        twice = [name for name in names if names.count(name) > 1]
        if not names or twice:
            raise ParameterError(
                Argument("model", twice[0] if twice else ""),
                " is named twice: name each once" if twice else " names none: give at least one",
            )
        self._entries = {model.name: _Entry(model) for model in models}
        self._memory = None if memory is None else parse_bytes(memory)
        self._patience, self._now = patience, now
        self._changed = asyncio.Condition()
        self._closed = False

    def names(self) -> list[str]:
        """All models, loaded or not, as they were given."""
        return list(self._entries)

    def state(self) -> dict[str, dict[str, Any]]:
        """By name: state, leases, those who wait for it, bytes (None: not known yet), and what its last load failed
        with."""
        return {
            name: {
                "state": "leaving" if entry.state == "loaded" and entry.wanted_by else entry.state,
                "leases": entry.leases,
                "waiting": entry.waiting,
                "bytes": entry.bytes,
                "error": None if entry.error is None else str(entry.error),
            }
            for name, entry in self._entries.items()
        }

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AsyncEngine]:
        """The model's engine, which stays loaded inside the block. Who comes while it loads waits for that one load.

        Raises ParameterError for a name that there is not, what loading raised (for ``patience`` seconds at once, then
        it is tried anew), and OutpaceError once the pool is closed.
        """
        if name not in self._entries:
            raise ParameterError(Argument("model", name), f" is not served: use {', '.join(self._entries)}")
        entry = self._entries[name]
        engine = await self._take(name, entry)
        try:
            yield engine
        finally:
            entry.leases -= 1
            entry.used = self._now()
            await asyncio.shield(self._tell())

    async def unload(self, name: str) -> bool:
        """Unload a model unless somebody uses it. Whether its memory is free, or about to be."""
        entry = self._entries[name]
        if entry.state == "loaded" and entry.idle:
            await self._unload(entry)
        return entry.state not in ("loaded", "loading")

    async def close(self) -> None:
        """Unload everything, in use or not; who waits gets an OutpaceError. Calling twice is allowed."""
        self._closed = True
        loads = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        await self._tell()
        await asyncio.gather(*loads, return_exceptions=True)
        for entry in self._entries.values():
            await self._unload(entry)

    async def _take(self, name: str, entry: _Entry) -> AsyncEngine:
        waited, failures = False, entry.failures
        entry.waiting += 1
        try:
            async with self._changed:
                while True:
                    if self._closed:
                        raise OutpaceError("the models are being unloaded: the server is shutting down")
                    granted = waited and entry.granted > 0
                    if entry.engine is not None and (granted or not entry.wanted_by):
                        entry.granted -= granted
                        entry.leases += 1
                        entry.used = self._now()
                        return entry.engine
                    if entry.error is not None and (entry.failures > failures or not self._may_retry(entry)):
                        raise entry.error
                    if entry.state in ("unloaded", "failed") and entry.loading is None:
                        entry.loading = asyncio.create_task(self._load(name, entry))
                    waited = True
                    await self._changed.wait()
        finally:
            entry.waiting -= 1
            entry.granted = min(entry.granted, entry.waiting)
            if not entry.waiting:
                await asyncio.shield(self._tell())  # a load that waits for room need wait no more

    def _may_retry(self, entry: _Entry) -> bool:
        return self._now() - entry.failed >= self._patience

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _load(self, name: str, entry: _Entry) -> None:
        try:
            entry.bytes = await asyncio.to_thread(entry.model.bytes)
            if not await self._make_room(name, entry):
                return
            log.info("loading %s (%s)", name, format_bytes(entry.bytes))
            entry.engine = await asyncio.to_thread(entry.model.load)
            entry.error = None
            entry.state, entry.used, entry.granted = "loaded", self._now(), entry.waiting
        except Exception as error:
            log.warning("%s could not be loaded: %s", name, error)
            entry.state, entry.error, entry.failed = "failed", error, self._now()
            entry.failures += 1
        finally:
            if entry.state == "loading":
                entry.state = "unloaded"
            for its in self._entries.values():
                its.wanted_by.discard(name)
            entry.loading = None
            await self._tell()

    async def _make_room(self, name: str, entry: _Entry) -> bool:
        """Unload others until ``entry`` fits, and count it as there. False: nobody waits for it any more. Raises
        MemoryLimitError when it never fits."""
        need = entry.bytes or 0
        if self._memory is not None and need > self._memory:
            raise MemoryLimitError(
                f"{name} takes {format_bytes(need)}, and all models together may take {format_bytes(self._memory)}: "
                "raise the bound, lower ",
                Argument("kv_memory"),
                ", or serve a smaller one",
            )
        while True:
            async with self._changed:
                if self._closed or not entry.waiting:
                    return False
                excess = 0 if self._memory is None else need + self._taken() - self._memory
                if excess <= 0:
                    entry.state = "loading"
                    return True
                victims = self._victims(name, excess)
                idle = next((its for its in victims if its.idle), None)
                if idle is None:
                    for its in victims:
                        its.wanted_by.add(name)
                    await self._changed.wait()
                    continue
                idle.wanted_by.add(name)
            log.info("unloading %s to make room for %s", idle.model.name, name)
            await self._unload(idle)

    def _taken(self) -> int:
        return sum(its.bytes or 0 for its in self._entries.values() if its.state in ("loading", "loaded", "leaving"))

    def _victims(self, name: str, excess: int) -> list[_Entry]:
        """Loaded models that free ``excess`` bytes: idle ones first, then the least recently used."""
        loaded = [its for its in self._entries.values() if its.state == "loaded" and its.model.name != name]
        found = []
        for its in sorted(loaded, key=lambda its: (not its.idle, its.used)):
            if excess <= 0:
                break
            found.append(its)
            excess -= its.bytes or 0
        return found

    async def _unload(self, entry: _Entry) -> None:
        engine, entry.engine = entry.engine, None
        if engine is None:
            return
        entry.state = "leaving"
        try:
            await asyncio.to_thread(engine.close)
        finally:
            entry.state = "unloaded"
            await self._tell()
