"""Admission: the rows and the queue are so many places, which API keys share, or addresses where there are no keys.

A request that was admitted is never dropped for another, since a stream has sent its status by then. So a flood is
stopped at admission: a key gets a place while it has fewer than are free, or a row is. Alone it comes to half of all
places, two that flood to a third each, k to 1 / (k + 1) each, and as much stays free for the next key. Source:
Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Trans. Networking 6
(1998), with alpha = 1.
"""

from __future__ import annotations

import math
from collections import Counter

from outpace.server.errors import BUSY, APIError


class Admission:
    """``rows``: samples that run; ``queue``: those that wait beyond them; ``shared``: several keys may ask."""

    def __init__(self, rows: int, queue: int, *, shared: bool) -> None:
        self.rows, self.capacity, self._shared = rows, rows + queue, shared
        self.inside = 0
        self._held: Counter[str] = Counter()  # samples by key; those that have none are not in it
        self._seconds = 1.0  # that a sample runs, on average

    @property
    def most(self) -> int:
        """Samples that one key may have where it is alone, and so one request."""
        return max(self.rows, (self.capacity + 1) // 2) if self._shared else self.capacity

    @property
    def largest(self) -> int:
        """Samples of the key that has the most."""
        return max(self._held.values(), default=0)

    def take(self, key: str, samples: int) -> None:
        """Let ``samples`` of a key in, all or none, as if one came after the other. Raises APIError (429)."""
        inside, held, free = self.inside + samples, self._held[key] + samples, self.capacity - self.inside
        if samples > free:
            raise self._busy("queue_full", f"the queue is full ({self.inside} samples): try again later")
        if self._shared and inside > self.rows and held > free - samples + 1:
            who = "address" if key.startswith("address") else "API key"
            raise self._busy(
                "queue_share",
                f"this {who} has its share of the queue ({held - samples} samples; {free} of {self.capacity} places "
                "are free): try again when some have ended",
            )
        self.inside, self._held[key] = inside, held

    def give(self, key: str, samples: int) -> None:
        """They have left."""
        self.inside -= samples
        self._held[key] -= samples
        if not self._held[key]:
            del self._held[key]

    def took(self, seconds: float) -> None:
        """A sample ran for so long."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def _busy(self, code: str, message: str) -> APIError:
        """429, with the seconds until there may be room."""
        waiting = max(self.inside - self.rows, 1)
        seconds = min(max(math.ceil(self._seconds * waiting / self.rows), 1), 60)
        return APIError(429, message, code=code, kind=BUSY, headers={"retry-after": str(seconds)})


class Places:
    """What one request has of them. Whoever makes it closes it."""

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission, self._key, self._samples = admission, key, 0

    def hold(self, samples: int) -> None:
        """Have so many or more. Raises APIError, and has what it had: 429, or 400 for what would never fit."""
        most = self._admission.most
        if samples > most:
            raise APIError(
                400, f"{samples} samples are more than this server queues for one request ({most}): ask for fewer",
                param="n",
            )  # fmt: skip
        if samples > self._samples:
            self._admission.take(self._key, samples - self._samples)
            self._samples = samples

    def close(self) -> None:
        """Give them back."""
        self._admission.give(self._key, self._samples)
        self._samples = 0
