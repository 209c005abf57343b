"""Several observers as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from outpace.server.errors import APIError
from outpace.server.events import Part
from outpace.server.generation import Generation
from outpace.server.metrics import Metrics

if TYPE_CHECKING:
    from outpace.server.service import Service


class Listener(Protocol):
    """An Observer but for what ``/metrics`` answers."""

    def began(self, generation: Generation) -> None: ...
    def gained(self, generation: Generation, parts: Sequence[Part]) -> None: ...
    def ended(self, generation: Generation, error: APIError | None) -> None: ...
    def refused(self, error: APIError) -> None: ...


class Observers:
    """``metrics`` and whoever else listens, in this order."""

    def __init__(self, metrics: Metrics, *others: Listener) -> None:
        self._metrics = metrics
        self._all: tuple[Listener, ...] = (metrics, *others)

    def began(self, generation: Generation) -> None:
        for its in self._all:
            its.began(generation)

    def gained(self, generation: Generation, parts: Sequence[Part]) -> None:
        for its in self._all:
            its.gained(generation, parts)

    def ended(self, generation: Generation, error: APIError | None) -> None:
        for its in self._all:
            its.ended(generation, error)

    def refused(self, error: APIError) -> None:
        for its in self._all:
            its.refused(error)

    async def exposition(self, service: Service) -> tuple[bytes, str]:
        return await self._metrics.exposition(service)
