"""Counter-based noise: every random number is a pure function of what it is for.

A number is addressed by ``(seed; token id, output index, sample, stream)`` and computed where it is needed,
so no draft, batch or schedule can shift it. The generator is Philox4x32-10 (Salmon et al., SC 2011, "Parallel
random numbers: as easy as 1, 2, 3"): key = the seed's two 32-bit halves, low half first; counter =
``(token // 4, output index, sample, stream)``; word ``token % 4`` of the block belongs to the token.

The native runtime computes the same bits, so ``log`` is spelled out in IEEE-754 basic operations (each correctly
rounded, none contracted) rather than taken from a library whose last bit differs from machine to machine.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

# The largest value that gumbel() can return: u is at most 1 - 2**-33, so -log(-log(u)) < 33 log 2 < 22.88.
GUMBEL_MAX = 22.88


class Stream(IntEnum):
    """What a random number decides. Streams never share a counter."""

    CHOICE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def fresh_seed() -> int:
    """A seed for a request that gave none, in [0, 2**63)."""
    return secrets.randbits(63)


def philox(counter: tuple[U32, int, int, int], key: int) -> tuple[U32, U32, U32, U32]:
    """Ten rounds of Philox4x32 on the counters ``(c0[i], c1, c2, c3)``; four words [n] for each.

    ``c0`` is uint32 [n]; the other words are shared; ``key`` is a 64-bit integer. Wrapping arithmetic.
    """
    x0 = counter[0].astype(np.uint64)
    x1, x2, x3 = (np.full_like(x0, word & _MASK) for word in counter[1:])
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    low = np.uint64(_MASK)
    shift = np.uint64(32)
    for _ in range(10):
        product0 = x0 * np.uint64(MULTIPLIERS[0])
        product1 = x2 * np.uint64(MULTIPLIERS[1])
        x0 = (product1 >> shift) ^ x1 ^ np.uint64(k0)
        x2 = (product0 >> shift) ^ x3 ^ np.uint64(k1)
        x1 = product1 & low
        x3 = product0 & low
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return (x0.astype(np.uint32), x1.astype(np.uint32), x2.astype(np.uint32), x3.astype(np.uint32))


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one sample of one request: a seed in [0, 2**64) and the sample's index."""

    seed: int
    sample: int = 0

    def bits(self, index: int, tokens: I32, stream: Stream) -> U32:
        """Raw words uint32 [n] for token ids ``tokens`` [n] at output ``index``."""
        ids = np.ascontiguousarray(tokens, dtype=np.uint32)
        n = len(ids)
        contiguous = n >= 4 and int(ids[-1]) - int(ids[0]) == n - 1 and bool((np.diff(ids.view(np.int32)) == 1).all())
        if contiguous:  # a whole vocabulary: each block serves four tokens
            first = int(ids[0]) // 4
            blocks = np.arange(first, int(ids[-1]) // 4 + 1, dtype=np.uint32)
            words = np.stack(philox((blocks, index, self.sample, int(stream)), self.seed), axis=1).ravel()
            skip = int(ids[0]) - 4 * first
            return words[skip : skip + n]
        blocks = ids >> np.uint32(2)
        words = np.stack(philox((blocks, index, self.sample, int(stream)), self.seed), axis=0)
        picked: U32 = words[(ids & np.uint32(3)).astype(np.intp), np.arange(n)]
        return picked

    def uniform(self, index: int, tokens: I32, stream: Stream) -> F64:
        """Uniforms float64 [n], strictly inside (0, 1): ``(word + 1/2) / 2**32``."""
        return to_uniform(self.bits(index, tokens, stream))

    def gumbel(self, index: int, tokens: I32, stream: Stream) -> F64:
        """Standard Gumbel noise float64 [n]: ``-log(-log(u))``."""
        return -log(-log(self.uniform(index, tokens, stream)))


def to_uniform(words: U32) -> F64:
    """uint32 words -> float64 in (0, 1). Exact: no rounding takes place."""
    uniform: F64 = (words.astype(np.float64) + 0.5) * 2.0**-32
    return uniform


SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LN2_HIGH = 6.93147180369123816490e-01  # the upper 33 bits of log 2: k * LN2_HIGH is exact
LN2_LOW = 1.90821492927058770002e-10
SERIES = tuple(2.0 / (2 * i + 3) for i in range(10))  # 2 atanh(s) = 2 s + s (2/3 s^2 + 2/5 s^4 + ...)


def log(x: F64) -> F64:
    """Natural logarithm of positive normal float64 [n], in basic operations of a fixed order.

    x = m 2^k with m in [sqrt(1/2), sqrt(2)); s = (m - 1) / (m + 1); log m = 2 atanh(s), by Horner's rule in s^2.
    Error under 2 units in the last place except near x = 1, where the absolute error stays under 1e-17.
    """
    m, exponent = np.frexp(x)  # m in [1/2, 1): exact
    small = m < SQRT_HALF
    m = np.where(small, m + m, m)
    k = np.where(small, exponent - 1, exponent).astype(np.float64)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    tail = np.full_like(z, SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        tail = tail * z + coefficient
    # 2 s is f - s f, which keeps the leading term exact.
    result: F64 = k * LN2_HIGH + (f - (s * (f - z * tail) - k * LN2_LOW))
    return result
