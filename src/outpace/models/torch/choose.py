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
        return np.array(columns, np.int64).reshape(-1, len(Asked._fields)).T

    @staticmethod
    def of(packed: Tensor) -> Asked:
        """From int64 [fields, n], where they are."""
        columns = packed[..., None].unbind()
        whole = ("top_k", "key0", "key1", "sample", "index")
        named = zip(Asked._fields, columns, strict=True)
        return Asked(*(c if name in whole else c.view(torch.float64) for name, c in named))


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
    largest = values.amax(-1, keepdim=True)
    size = largest.abs()
    scaled = values / asked.temperature
    if filtered:
        ids, scaled, unsure = _filtered(logits.float(), values, largest, scaled, asked)
        drawn = uniform(ids, asked)
        best = scaled - torch.log(-torch.log(drawn))
    else:
        blocks = torch.arange(-(-logits.shape[1] // 4), device=logits.device)[None]
        every = _uniform(_philox(blocks, *asked[5:]).flatten(1)[:, : logits.shape[1]])
        best, ids = (scaled - torch.log(-torch.log(every))).topk(min(CLOSE, logits.shape[1]))
        drawn = every.gather(-1, ids)
        close = best >= best[:, :1] - EDGE * (1 + best[:, :1].abs())
        scaled = scaled.gather(-1, ids).masked_fill(~close, -torch.inf)
        unsure = close[:, -1] & (ids.shape[1] < logits.shape[1])
    scores = scaled + gumbel(drawn)
    most = scores.amax(-1, keepdim=True)
    chosen = ids.masked_fill(scores != most, logits.shape[1]).amin(-1)
    chosen = chosen.masked_fill(unsure | ~(size[:, 0] < torch.inf), LEFT)
    if not rounding:
        return torch.stack([chosen, torch.zeros_like(chosen)])
    within = rounding * size.clamp(min=1.0) / asked.temperature
    return torch.stack([chosen, (best >= best.amax(-1, keepdim=True) - within).sum(-1) > 1])


def _filtered(
    logits: Tensor, values: Tensor, peak: Tensor, scaled: Tensor, asked: Asked
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens' ids [n, C], best first; their logits / T, -inf where the filters do not keep them; and
    whether that is unsure [n]. ``peak`` [n, 1]: the largest of ``values``."""
    absent = values == -torch.inf
    count = values.shape[1] - absent.sum(-1, keepdim=True)
    mean = values.masked_fill(absent, 0.0).sum(-1, keepdim=True) / count
    spread = torch.linalg.vector_norm((values - mean).masked_fill(absent, 0.0), dim=-1, keepdim=True) / count.sqrt()
    least = (peak - asked.top_n_sigma * spread).masked_fill(asked.top_n_sigma <= 0, -torch.inf)
    unsure = ((values - least).abs() < EDGE * (1 + least.abs())).any(-1)
    scaled = scaled.masked_fill(values < least, -torch.inf)
    ids = likeliest(logits, CANDIDATES)
    rank = torch.arange(ids.shape[1], device=ids.device)[None]
    limit = asked.top_k.masked_fill(asked.top_k <= 0, values.shape[1])
    best, top = scaled.gather(-1, ids).masked_fill(rank >= limit, -torch.inf), peak / asked.temperature
    weights = (best - top).exp()
    every = (scaled - top).exp().sum(-1, keepdim=True)
    cut = limit <= ids.shape[1]
    summed = weights.cumsum(-1)
    reached = summed / torch.where(cut, summed[:, -1:], every)
    past = asked.top_p.masked_fill(asked.top_p >= 1, torch.inf)  # no filter
    unsure |= (((reached - past).abs() < EDGE) & (best > -torch.inf)).any(-1)
    out = torch.nn.functional.pad(reached[:, :-1] >= past, (1, 0))  # the likeliest token always stays
    best = best.masked_fill(out | (best < top + asked.min_p), -torch.inf)
    if ids.shape[1] < values.shape[1]:
        unsure |= (best[:, -1] > -torch.inf) & ~cut[:, 0]  # others may stay, too
    return ids, best, unsure


def likeliest(logits: Tensor, k: int) -> Tensor:
    """int64 [..., k]: the tokens of the largest logits float32 [..., V], best first, the lower on ties."""
    bits = (logits + 0.0).contiguous().view(torch.int32)  # in the order of whole numbers, but for negative ones
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    vocab = logits.shape[-1]
    keys = torch.add(torch.arange(vocab - 1, -1, -1, device=logits.device), ordered, alpha=1 << 24)
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
    values = logits.double()
    scaled = values / asked.temperature
    if not filtered:
        return torch.arange(logits.shape[1], device=logits.device)[None], scaled
    return _filtered(logits, values, values.amax(-1, keepdim=True), scaled, asked)[:2]


def uniform(ids: Tensor, asked: Asked) -> Tensor:
    """The numbers float64 [n, m] in (0, 1) that tokens int64 [n, m] draw."""
    words = _philox(ids >> 2, *asked[5:])
    which = (ids & 3)[..., None].expand(*words.shape[:-1], 1)
    return _uniform(words.gather(-1, which)[..., 0])


def _uniform(words: Tensor) -> Tensor:
    return (words.double() + 0.5) * 2.0**-32


def _philox(block: Tensor, k0: Tensor, k1: Tensor, sample: Tensor, index: Tensor) -> Tensor:
    """``noise.philox`` for the stream of choices: int64 [n, m, 4], words below 2**32. Both halves of a round are one
    tensor [2, n, m]."""
    (m0, m1), (w0, w1) = noise.MULTIPLIERS, noise.WEYL
    rounds = torch.arange(10, device=block.device)[:, None, None]
    keys = torch.stack([torch.add(k0, rounds, alpha=w0), torch.add(k1, rounds, alpha=w1)], 1)  # masked where used
    multipliers = torch.arange(m0, m1 - 1, m1 - m0, device=block.device)[:, None, None]  # both, made on the device
    even = torch.stack(torch.broadcast_tensors(block, sample & _MASK))
    odd = torch.stack([index & _MASK, torch.full_like(index, int(Stream.CHOICE))])
    for key in keys.unbind():
        low, high = (even * multipliers).flip(0)[..., None].view(torch.int32).unbind(-1)
        even, odd = (high ^ odd ^ key) & _MASK, low
    odd = odd & torch.full_like(index, _MASK)
    return torch.stack([even[0], odd[0], even[1], odd[1]], -1)


def _log(x: Tensor) -> Tensor:
    """``noise.log`` of positive normal float64."""
    m, exponent = torch.frexp(x)
    small = m < noise.SQRT_HALF
    m = torch.where(small, m + m, m)
    k = torch.add(exponent, small, alpha=-1).double()
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    tail: Any = noise.SERIES[-1]
    for coefficient in noise.SERIES[-2::-1]:
        tail = tail * z + coefficient
    return k * noise.LN2_HIGH + (f - (s * (f - z * tail) - k * noise.LN2_LOW))
