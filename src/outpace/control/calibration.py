"""How often drafted tokens are accepted, learned online: what a drafter's own confidence is worth.

A node is *tried* when its parent was accepted (or is the pending token). The chance that a tried node is accepted is
learned by source, kind of sampling, depth and the drafter's own conditional confidence, in buckets that all rows
share and that forget; a row's bias, in log-odds, moves all of its chances together.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

from outpace.types import SamplingParams

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98)
STRENGTH = 4.0  # trials that a drafter's own word counts for
MEMORY = 400.0  # trials a bucket remembers
FADE = 1 / 3000  # of a bucket's counts, a step: what was learned of a spell of bad luck is tried again
UNKNOWN = 0.6  # chance of a node whose drafter gives none
RATE = 0.15  # of a row's bias, in log-odds a trial
LIMIT = 3.0  # of a row's bias

Key = tuple[str, int, int, int]  # source, kind of sampling, depth (0, 1: deeper), bucket (-1: no confidence)


@dataclass(slots=True)
class _Bucket:
    accepted: float = 0.0
    tried: float = 0.0
    step: int = 0


class Calibration:
    """Shared counts. ``step`` counts the engine's steps, for forgetting."""

    def __init__(self) -> None:
        self._buckets: dict[Key, _Bucket] = {}
        self.step = 0

    @staticmethod
    def key(source: str, kind: int, depth: int, confidence: float | None) -> Key:
        """``confidence``: the drafter's chance for the node given its parent (None: it gives none)."""
        return (
            source,
            kind,
            min(depth, 7) if confidence is None else min(depth, 1),
            (-1 if confidence is None else bisect(EDGES, confidence)),
        )

    def chance(self, key: Key, confidence: float | None, bias: float) -> float:
        """The calibrated chance in (0, 1) that a node is accepted, given that it is tried."""
        said = UNKNOWN if confidence is None else min(max(confidence, 0.005), 0.995)
        bucket = self._buckets.get(key)
        if bucket is not None:
            kept = math.exp((bucket.step - self.step) * FADE)
            said = (bucket.accepted * kept + STRENGTH * said) / (bucket.tried * kept + STRENGTH)
        if not bias:
            return said
        return 1.0 / (1.0 + (1.0 / said - 1.0) * math.exp(-bias))

    def learn(self, key: Key, accepted: bool) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(step=self.step)
        keep = (1.0 - 1.0 / MEMORY) * math.exp((bucket.step - self.step) * FADE)
        bucket.accepted = bucket.accepted * keep + accepted
        bucket.tried = bucket.tried * keep + 1.0
        bucket.step = self.step


def kind_of(params: SamplingParams) -> int:
    """Requests whose acceptance may be pooled: greedy, cool sampling, warm sampling."""
    return 0 if params.greedy else 1 if params.temperature < 0.9 else 2


def moved(bias: float, chance: float, accepted: bool) -> float:
    """A row's bias after a trial."""
    return max(-LIMIT, min(LIMIT, bias + RATE * (accepted - chance)))
