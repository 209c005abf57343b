"""Wall time of a step, by phase."""

from __future__ import annotations

import time


class Clock:
    """Splits a step's wall time among its phases: draft, target, verify, other."""

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0, "other": 0.0}
        self._phase, self._since = "other", time.perf_counter()

    def start(self, phase: str) -> None:
        """What follows belongs to ``phase``."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def so_far(self) -> dict[str, float]:
        """Seconds by phase until now."""
        self.start(self._phase)
        return self._seconds
