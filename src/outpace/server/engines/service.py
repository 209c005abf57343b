"""The service behind the routes: models, admission, requests from their beginning to their end, and shutting down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from outpace.common import allocator
from outpace.engine.aio import AsyncEngine
from outpace.errors import OutpaceError
from outpace.server.admission import Places
from outpace.server.engines.generation import Caller, Generation, Observer, Work, seeded
from outpace.server.engines.models import Models, Served
from outpace.server.engines.shares import KEY, Shares, Workers
from outpace.server.errors import APIError
from outpace.server.observe.traces import Traces
from outpace.server.schema import Unknown
from outpace.server.settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE = 8  # bodies of more than 64 KiB that are read or prepared at once
_FAILURES, _REST = 4, 30.0  # steps, two a request, after which a server is not ready for so many seconds
_LAST = 2.0  # seconds that readers have to take the final error


class Service:
    """``models``: what is served, closed with the service. ``fingerprint``: of a loaded model. ``observers``: metrics,
    logs, spans. ``spellings``: other names of models, which are not listed. All methods belong to the event loop's
    thread."""

    def __init__(
        self,
        models: Models,
        settings: ServerSettings,
        *,
        fingerprint: Callable[[AsyncEngine], str],
        observers: Sequence[Observer] = (),
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        self.models, self.settings, self.observers = models, settings, tuple(observers)
        self._fingerprint = fingerprint
        shared = len(settings.api_keys) > 1
        self._workers = Workers(shared=shared)
        self.large = Shares(_LARGE, _LARGE // 2 if shared else _LARGE)  # places of large bodies
        self._served: dict[str, Served] = {}
        self.unknown = Unknown(refused=settings.strict_fields)
        self._spellings = {**(spellings or {}), **dict.fromkeys(settings.aliases, models.names()[0])}
        self._generations: set[Generation] = set()
        self.inside = self.came = 0  # requests that are prepared, wait or run; and ever were
        self._loading: set[asyncio.Timeout] = set()  # of requests that wait for their model
        self._over: asyncio.Event | None = None
        self.draining = self._refusing = False  # nothing new is taken; nothing that has not begun goes on
        self.traces = Traces(settings.traces, settings.trace_probabilities) if settings.traces else None
        self.started = int(time.time())

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function`` off the event loop, in a thread that API keys take turns for."""
        return await self._workers.run(function, *arguments)

    async def begin(self, name: str | None, translate: Callable[[Served], Work], caller: Caller) -> Generation:
        """A request, running. Raises what translating or queueing it raises; then nothing of it is left."""
        self.check_open()
        async with AsyncExitStack() as held:
            self.enter(held)
            model = await self.model(name, held)
            places = self._placed(model, held)
            work = await self.work(translate, model)
            places.hold(work.samples)
            work = replace(work, params=seeded(work.params))
            engine, owner = model.serving.engine, KEY.get()
            if not model.serving.alive:
                raise _stopped()

            def prepared() -> list[Any]:
                return [
                    engine.prepare(its.tolist(), work.params, owner=owner, **work.options, **work.resumed(i))
                    for i, its in enumerate(work.prompts)
                ]

            try:
                requests = await self.work(prepared)
                if self._refusing:
                    raise _ending()
                running = await model.serving.open(requests)
            except OutpaceError:
                if model.serving.alive:
                    raise
                raise _stopped() from None  # since it was asked above
            held.callback(running.close)
            made = partial(Generation, model, work, running, caller, self.observers)
            generation = made() if work.resume is None else await self.work(made)  # it reads what was delivered
            self._generations.add(generation)
            held.callback(self._generations.discard, generation)
            if self.traces is not None:
                self.traces.began(generation.id, caller.scope, engine, running.ids, work.samples)
            for observer in self.observers:
                observer.began(generation)
            generation.held = held.pop_all()
            return generation

    def names(self) -> list[str]:
        """What the models are called, the usual names first."""
        return list(dict.fromkeys((*self.models.names(), *self.settings.aliases)))

    def named(self, name: str | None) -> str:
        """The usual name of the model that a request calls so. Raises APIError (404) where there is none."""
        names = self.models.names()
        if name in names:
            return name
        if name is None or self.settings.any_name:
            return self._spellings.get(name or "", names[0])
        if name in self._spellings:
            return self._spellings[name]
        there = ", ".join(self.names())
        raise APIError(404, f"the model {name!r} is not served: use {there}", param="model", code="model_not_found")

    async def admitted(self, name: str | None, held: AsyncExitStack) -> Served:
        """The model of that name for what asks no engine: leased, with a place of the queue's, until ``held`` closes.
        Raises APIError (404, 429, 503)."""
        self.check_open()
        model = await self.model(name, held)
        self._placed(model, held)
        return model

    def _placed(self, model: Served, held: AsyncExitStack) -> Places:
        places = held.enter_context(closing(Places(model.admission, KEY.get())))
        places.hold(1)
        return places

    def enter(self, held: AsyncExitStack) -> None:
        """Count a request as in flight until ``held`` closes."""
        self.inside += 1
        self.came += 1
        held.callback(self._left)

    async def model(self, name: str | None, held: AsyncExitStack) -> Served:
        """The model of that name, leased until ``held`` closes. Raises APIError (404) for one that there is not."""
        name = self.named(name)
        serving = await self._leased(name, held)
        known = self._served.get(name)
        if known is None or known.serving is not serving:
            fingerprint = await self.work(self._fingerprint, serving)
            if self.traces is not None:
                await self.traces.watch(serving)
            known = self._served.get(name)
        if known is None or known.serving is not serving:
            known = Served(name, serving, self.settings, fingerprint=fingerprint)
            self._served[name] = known
        return known

    async def _leased(self, name: str, held: AsyncExitStack) -> AsyncEngine:
        """Raises APIError (503) when the server ends before the model is there."""
        patience = asyncio.timeout(0 if self._refusing else None)
        self._loading.add(patience)
        try:
            async with patience:
                serving: AsyncEngine = await held.enter_async_context(self.models.lease(name))
        except TimeoutError:
            if patience.expired():
                raise _ending() from None
            raise
        finally:
            self._loading.discard(patience)
        return serving

    async def unload(self, name: str) -> bool:
        """Unload a model unless it is in use or the only one; whether it is gone."""
        gone = await self.models.unload(name)
        if gone:
            self._served.pop(name, None)
        return gone

    def known(self, name: str) -> Served | None:
        """A model that has served; None: not yet."""
        return self._served.get(name)

    def check_ready(self) -> None:
        """Raise APIError (503) unless requests are taken, and some engine's last steps did not all fail. After a while
        without a failure such an engine may be tried again."""
        self.check_open()
        now = time.monotonic()
        stopped = {known.name for known in self._served.values() if not known.serving.alive}
        failing = {
            known.name for known in self._served.values()
            if known.serving.failures >= _FAILURES and now - known.serving.failed_at < _REST
        }  # fmt: skip
        if stopped | failing == set(self.models.names()):
            if failing:
                raise APIError(503, "steps of the engine fail: the server's log has why", code="engine_failing")
            raise _stopped()

    def check_open(self) -> None:
        """Raise APIError (503) while the server ends."""
        if self.draining:
            raise APIError(503, "the server is shutting down: try another", code="shutting_down")

    def _left(self) -> None:
        self.inside -= 1
        if self._over is not None and not self.inside:
            self._over.set()

    async def drain(self) -> None:
        """Take nothing new; give what runs ``settings.drain`` seconds to end, then end it with an error."""
        self.draining = True
        self._over = asyncio.Event()
        if not self.inside:
            return
        log.info("shutting down: %d requests have %g s to end", self.inside, self.settings.drain)
        try:
            async with asyncio.timeout(self.settings.drain):
                await self._over.wait()
        except TimeoutError:
            log.warning("%d requests did not end in time and are refused", self.inside)
            self._refusing = True
            for patience in self._loading:
                patience.reschedule(asyncio.get_running_loop().time())
            for generation in list(self._generations):
                generation.abort(_ending())
            try:
                async with asyncio.timeout(_LAST):
                    await self._over.wait()
            except TimeoutError:
                log.warning("%d requests got no final error: their readers take nothing", self.inside)

    async def close(self) -> None:
        """Unload the models."""
        await self.models.close()
        self._workers.close()


def _stopped() -> APIError:
    return APIError(503, "the engine has stopped: start the server again", code="engine_stopped")


def _ending() -> APIError:
    return APIError(503, "the server is shutting down", code="shutting_down")


async def trimmed(service: Service) -> None:
    """Until the server ends: give free pages back to the system once no request was in flight for ``settings.idle``
    seconds, or up to twice that; again after further requests."""
    seen, done = 0, -1  # requests so far, a look ago and when it was trimmed
    while True:
        await asyncio.sleep(service.settings.idle)
        if service.draining:
            return
        if not service.inside and service.came == seen != done:
            await service.work(allocator.trim)
            done = seen
        seen = service.came
