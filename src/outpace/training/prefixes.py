"""How much of a draft is worth verifying."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def best_prefix(confidence: npt.NDArray[np.floating], cost: float) -> npt.NDArray[np.int64]:
    """How much of each draft to verify: int64 [n], of ``confidence`` [n, K], each given that those before are accepted.

    The length that has most expected tokens a second, where each token of the draft makes a step ``cost`` of a plain
    one's time longer; the shorter one on ties.
    """
    path = np.cumprod(np.asarray(confidence, np.float64), 1)
    tokens = 1 + np.concatenate((np.zeros((len(path), 1)), np.cumsum(path, 1)), 1)
    seconds = 1 + cost * np.arange(tokens.shape[1])
    best: npt.NDArray[np.int64] = (tokens / seconds).argmax(1)
    return best
