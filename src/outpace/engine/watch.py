"""A time limit that costs next to nothing to set: streams set two for every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
