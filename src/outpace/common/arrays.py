"""Names of array types, and functions of token arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

_PERIOD, _ROUNDS, _SHORTEST = 48, 3, 12  # of a loop: most tokens of a period, periods, and least tokens in all


def common_prefix(a: I32, b: I32) -> int:
    """How many tokens int32 [n] and [m] have in common at the start."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def repeated_tail(tokens: Sequence[int] | I32) -> int:
    """How many of ``tokens`` [n], at the end, repeat those before them over and over; 0 where they do not.

    At least three periods of at most 48 tokens, and 12 tokens in all, are a loop; the first period is no repetition.
    """
    tokens = np.asarray(tokens)
    for period in range(1, min(_PERIOD, len(tokens) // _ROUNDS) + 1):
        differ = np.flatnonzero(tokens[:-period] != tokens[period:])
        start = int(differ[-1]) + 1 if len(differ) else 0
        if len(tokens) - start >= max(_ROUNDS * period, _SHORTEST):
            return len(tokens) - start - period
    return 0
