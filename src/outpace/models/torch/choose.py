"""The target's choices where the logits are: the same tokens as ``sampling.choose``, without a copy of any logits.

Noise is the CPU's to the bit: Philox in int64, which wraps, and the spelled-out logarithm in operations of float64 that
round correctly, one at a time. Where sums decide (a filter's edge), another order could decide otherwise: what lies
nearer to one than ``EDGE`` is left to the host, as are logits that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.exact import noise
from outpace.exact.noise import Stream
from outpace.exact.sampling import Chooser

EDGE = 1e-9
CANDIDATES = 1024  # that filters may leave: more are left to the host
CLOSE = 32  # tokens whose rough scores are so near the best that the exact ones decide
LEFT = -1  # the choice of what is left to the host
# What rounding may change in a logit, as a share of the largest one's size (at least 1): products for another width add
# in another order. Measured: 5e-5 of logits near 20 in float32, 0.22 of logits between 16 and 32 in bfloat16.
ROUNDING = {torch.float32: 2.0**-15, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
_MASK = 0xFFFFFFFF
FIELDS = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "key0", "key1", "sample", "index")


class Asked(NamedTuple):
    """n choices, each field [n, 1]: float64 for parameters (``min_p``: its logarithm), int64 for what noise counts."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    top_n_sigma: Tensor
    key0: Tensor
    key1: Tensor
    sample: Tensor
    index: Tensor

    @staticmethod
    def packed(choosers: Sequence[Chooser], depths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """int64 [fields, n] of the choosers' choices, so many tokens further on; floats as their bits."""
        columns = []
        for c, depth in zip(choosers, depths.tolist(), strict=True):
            p, seed = c.params, c.noise.seed
            least = float(noise.log(np.array([p.min_p]))[0]) if p.min_p > 0 else -np.inf
            floats = np.array([p.temperature, p.top_p, least, p.top_n_sigma]).view(np.int64).tolist()
            whole = (seed & _MASK, seed >> 32 & _MASK, c.noise.sample, c.index + depth)
            columns.append((floats[0], p.top_k, *floats[1:], *whole))
        return np.array(columns, np.int64).reshape(-1, len(FIELDS)).T

    @staticmethod
    def of(packed: Tensor) -> Asked:
        """From int64 [fields, n], where they are."""
        columns = packed[..., None].unbind()
        whole = ("top_k", "key0", "key1", "sample", "index")
        return Asked(*(c if name in whole else c.view(torch.float64) for name, c in zip(FIELDS, columns, strict=True)))


def greedy(logits: Tensor, rounding: float = 0.0) -> Tensor:
    """int64 [2, n]: the likeliest tokens of logits [n, V], the lowest id on ties, LEFT where that is not finite; and
    whether ``rounding`` might have chosen otherwise (``sampling.judged``)."""
    best = logits.argmax(-1)
    most = logits.gather(-1, best[:, None]).float()
    chosen = torch.where(most[:, 0].isfinite(), best, LEFT)
    near = (logits >= most - rounding * most.abs().clamp(min=1.0)).sum(-1) > 1 if rounding else torch.zeros_like(best)
    return torch.stack([chosen, near])


def sampled(logits: Tensor, asked: Asked, filtered: bool, rounding: float = 0.0) -> Tensor:
    """As ``greedy``: ``sampling.choose`` of logits [n, V]. ``filtered``: whether any of them has a filter."""
    values = logits.double()
    scaled = values / asked.temperature
    if filtered:
        ids, kept, sure = _filtered(logits.float(), values, scaled, asked)
        drawn = uniform(ids, asked)
        best = torch.where(kept, scaled.gather(-1, ids) - torch.log(-torch.log(drawn)), -torch.inf)
    else:
        blocks = torch.arange(-(-logits.shape[1] // 4), device=logits.device)[None]
        words = torch.stack(_philox(blocks, *asked[5:]), -1).flatten(1)[:, : logits.shape[1]]
        every = _uniform(words)
        best, ids = (scaled - torch.log(-torch.log(every))).topk(min(CLOSE, logits.shape[1]))
        drawn = every.gather(-1, ids)
        kept = best >= best[:, :1] - EDGE * (1 + best[:, :1].abs())
        sure = ~kept[:, -1] | (ids.shape[1] == logits.shape[1])
    scores = scaled.gather(-1, ids) + gumbel(drawn)
    scores = torch.where(kept, scores, -torch.inf)
    most = scores.amax(-1, keepdim=True)
    chosen = torch.where(scores == most, ids, logits.shape[1]).amin(-1)
    largest = values.amax(-1, keepdim=True)
    within = rounding * largest.abs().clamp(min=1.0) / asked.temperature
    near = (best >= best.amax(-1, keepdim=True) - within).sum(-1) > 1
    return torch.stack([torch.where(sure & largest[:, 0].isfinite(), chosen, LEFT), near & (rounding > 0)])


def _filtered(logits: Tensor, values: Tensor, scaled: Tensor, asked: Asked) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens' ids [n, C], best first, which of them the filters keep, and whether that is sure [n]."""
    n, vocab = logits.shape
    there = values > -torch.inf
    count = there.sum(-1, keepdim=True)
    mean = torch.where(there, values, 0.0).sum(-1, keepdim=True) / count
    spread = (torch.where(there, values - mean, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    peak = values.amax(-1, keepdim=True)
    least = torch.where(asked.top_n_sigma > 0, peak - asked.top_n_sigma * spread, -torch.inf)
    there &= values >= least
    unsure = ((values - least).abs() < EDGE * (1 + least.abs())).any(-1)
    ids = likeliest(logits, CANDIDATES)
    rank = torch.arange(ids.shape[1], device=ids.device)[None]
    kept = there.gather(-1, ids) & ((asked.top_k <= 0) | (rank < asked.top_k))
    best, top = scaled.gather(-1, ids), scaled.amax(-1, keepdim=True)
    weights = torch.where(kept, (best - top).exp(), 0.0)
    every = torch.where(there, (scaled - top).exp(), 0.0).sum(-1, keepdim=True)
    cut = (asked.top_k > 0) & (asked.top_k <= ids.shape[1])
    reached = (weights / torch.where(cut, weights.sum(-1, keepdim=True), every)).cumsum(-1)
    some = asked.top_p < 1
    unsure |= (some & kept & ((reached - asked.top_p).abs() < EDGE)).any(-1)
    before = torch.cat([reached.new_zeros(n, 1), reached[:, :-1]], -1)
    kept &= ~some | (before < asked.top_p) | (rank == 0)
    kept &= best >= top + asked.min_p
    whole = ids.shape[1] == vocab
    return ids, kept, ~unsure & (~kept[:, -1] | cut[:, 0] | whole)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """int64 [..., k]: the tokens of the largest logits float32 [..., V], best first, the lower on ties."""
    bits = (logits + 0.0).contiguous().view(torch.int32)  # in the order of whole numbers, but for negative ones
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    vocab = logits.shape[-1]
    keys = ordered * (1 << 24) + torch.arange(vocab - 1, -1, -1, device=logits.device)
    if k == 1:  # a card's topk of whole numbers takes ten times as long
        return vocab - 1 - (keys.amax(-1, keepdim=True) & 0xFFFFFF)
    return keys.topk(min(k, vocab), -1).indices


def gumbel(drawn: Tensor) -> Tensor:
    """``Noise.gumbel`` float64 [n, m] of uniform numbers [n, m]: the CPU's bits."""
    return -_log(-_log(drawn))


def rough_gumbel(ids: Tensor, asked: Asked) -> Tensor:
    """``Noise.gumbel`` up to the last bits, of tokens int64 [n, m] or [1, m] for all."""
    return -torch.log(-torch.log(uniform(ids, asked)))


def kept(logits: Tensor, asked: Asked, filtered: bool) -> tuple[Tensor, Tensor]:
    """Tokens [n, m], or [1, m] for all, that the filters keep, up to rounding, and logits / T float64 [n, m] of them:
    -inf where they do not."""
    scaled = logits.double() / asked.temperature
    if not filtered:
        return torch.arange(logits.shape[1], device=logits.device)[None], scaled
    ids, some, _ = _filtered(logits, logits.double(), scaled, asked)
    return ids, torch.where(some, scaled.gather(-1, ids), -torch.inf)


def uniform(ids: Tensor, asked: Asked) -> Tensor:
    """The numbers float64 [n, m] in (0, 1) that tokens int64 [n, m] draw."""
    words = torch.stack(_philox(ids >> 2, *asked[5:]), -1)
    which = (ids & 3)[..., None].expand(*words.shape[:-1], 1)
    return _uniform(words.gather(-1, which)[..., 0])


def _uniform(words: Tensor) -> Tensor:
    return (words.double() + 0.5) * 2.0**-32


def _philox(block: Tensor, k0: Tensor, k1: Tensor, sample: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """``noise.philox`` for the stream of choices: four words, int64 below 2**32."""
    x0, x1, x2, x3 = block, index & _MASK, sample & _MASK, torch.full_like(index, int(Stream.CHOICE))
    for _ in range(10):
        p0, p1 = x0 * noise.MULTIPLIERS[0], x2 * noise.MULTIPLIERS[1]
        x0, x1 = (p1 >> 32 & _MASK) ^ x1 ^ k0, p1 & _MASK
        x2, x3 = (p0 >> 32 & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = k0 + noise.WEYL[0] & _MASK, k1 + noise.WEYL[1] & _MASK
    return x0, x1, x2, x3


def _log(x: Tensor) -> Tensor:
    """``noise.log`` of positive normal float64."""
    m, exponent = torch.frexp(x)
    small = m < noise.SQRT_HALF
    m = torch.where(small, m + m, m)
    k = torch.where(small, exponent - 1, exponent).double()
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    tail: Any = noise.SERIES[-1]
    for coefficient in noise.SERIES[-2::-1]:
        tail = tail * z + coefficient
    return k * noise.LN2_HIGH + (f - (s * (f - z * tail) - k * noise.LN2_LOW))
