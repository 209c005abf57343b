"""Counter-based noise as the luck that ``verify.reject`` needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outpace.common.arrays import F64
from outpace.exact.noise import Noise, Stream
from outpace.exact.sampling import gumbel_max


@dataclass(frozen=True, slots=True)
class NoiseChance:
    """``verify.Chance`` for one row and step. ``index``: the output index of the token after the pending one."""

    noise: Noise
    index: int

    def accept(self, probability: float, depth: int, trial: int) -> bool:
        uniform = self.noise.uniform(self.index + depth, np.array([trial], np.int32), Stream.ACCEPT)
        return bool(uniform[0] < probability)

    def draw(self, weights: F64, depth: int) -> int:
        return self._gumbel_max(weights, depth, Stream.RESIDUAL)

    def choose(self, p: F64, depth: int) -> int:
        return self._gumbel_max(p, depth, Stream.CHOICE)

    def _gumbel_max(self, weights: F64, depth: int, stream: Stream) -> int:
        kept = np.flatnonzero(weights > 0).astype(np.int32)
        return gumbel_max(kept, np.log(weights[kept]), self.noise, self.index + depth, stream)[0]
