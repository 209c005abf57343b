"""One model that is always there, with the face of a pool of models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from outpace.engine.aio import AsyncEngine


class Models(Protocol):
    """The models of a server, by name. The first name is the one that requests get who name none."""

    def names(self) -> list[str]: ...
    def lease(self, name: str) -> Any:
        """``async with`` it: the model's AsyncEngine, which stays loaded meanwhile."""

    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """By name, what is known of each; "state" is "loaded" or another."""

    async def close(self) -> None: ...


class SingleModel:
    """``engine`` under ``name``; it is closed with this."""

    def __init__(self, name: str, engine: AsyncEngine) -> None:
        self._name, self._engine = name, engine

    def names(self) -> list[str]:
        return [self._name]

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AsyncEngine]:
        yield self._engine

    def state(self) -> dict[str, dict[str, Any]]:
        return {self._name: {"state": "loaded"}}

    async def close(self) -> None:
        await self._engine.__aexit__(None, None, None)
