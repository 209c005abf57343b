"""Trees of drafted nodes, grown level by level where the logits are (EAGLE-2, arXiv 2406.16858).

In C++: native/model/grow.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.picks import RIVALS
from outpace.errors import NotFiniteError
from outpace.exact.drafts import Draft, Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.models.torch.choose import Asked, kept, likeliest, rough_gumbel
from outpace.models.torch.upload import uploaded
from outpace.params import SamplingParams


class Bucket(NamedTuple):
    """A draft's shape. Its batch is filled up with its first row and its first entry, once more."""

    rows: int
    entries: int
    slots: int  # positions that are read of each row
    levels: int
    branch: int
    nodes: int
    noise: int  # 0: every row is greedy; 1: some sample; 2: with filters


SAMPLES = Chooser(SamplingParams(temperature=1.0), Noise(0), 0)  # stands for one where nothing samples


def noise_of(asks: Sequence[Ask]) -> int:
    """As in ``Bucket``."""
    sampled = [ask.chooser.params for ask in asks if ask.chooser is not None and not ask.chooser.params.greedy]
    return 2 if any(params.filtered for params in sampled) else 1 if sampled else 0


def choices(asks: Sequence[Ask]) -> npt.NDArray[np.int64]:
    """int64 [1 + fields, B]: whether each samples, and by which noise (``Asked``)."""
    choosers = [ask.chooser if ask.chooser and not ask.chooser.params.greedy else None for ask in asks]
    samples = np.array([[chooser is not None for chooser in choosers]], np.int64)
    asked = Asked.packed([chooser or SAMPLES for chooser in choosers], np.zeros(len(asks), np.int64))
    return np.concatenate([samples, asked])


class Trees:
    """Trees (or chains) of a bucket's rows, grown where the logits are. ``ids`` int64 [D]: the target's ids of the
    draft vocabulary, ascending; ``depths`` int64 [B], ``samples`` bool [B], ``asked`` of B choices. What a row has no
    room for has a gain of -inf, and is expanded for nothing."""

    def __init__(self, bucket: Bucket, ids: Tensor, depths: Tensor, samples: Tensor, asked: Asked) -> None:
        self._bucket, self._ids = bucket, ids
        self._depths, self._samples, self._asked = depths, samples[:, None, None], asked
        self._frontier = ids.new_full((bucket.rows, 1), -1)  # indices among all nodes
        self._gains = torch.zeros((bucket.rows, 1), dtype=torch.float64, device=ids.device)  # logarithms, of its nodes
        self._finite = torch.ones((), dtype=torch.bool, device=ids.device)
        self._grown: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents and gains [B, n] of each level

    def add(self, logits: Tensor, level: int, sure: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Children of the frontier's nodes, of logits float32 [B, m, D]; then the likeliest of these are the frontier:
        their tokens [B, m'], and where in the frontier before each one's parent stands. ``sure`` [B, m]: the chance of
        the likeliest without noise; the others share the rest as they do by themselves."""
        m, branch, noise = logits.shape[1], self._bucket.branch, self._bucket.noise
        self._finite = self._finite & torch.isfinite(logits.amax())
        index = likeliest(logits, branch)
        gains = (logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)).double()
        if sure is not None:
            rest = torch.log1p(-sure.double()) - torch.log1p(-gains[..., 0].exp()).clamp(min=-700.0)
            gains = torch.cat([sure.double().log()[..., None], gains[..., 1:] + rest[..., None]], -1)
        if noise:
            asked = Asked(*(each.repeat_interleave(m, 0) for each in self._asked))
            asked = asked._replace(index=asked.index + level)
            others, chances = noisy(logits.flatten(0, 1), asked, self._ids, branch, noise == 2)
            index = torch.where(self._samples, others.view(index.shape), index)
            gains = torch.where(self._samples, chances.view(index.shape), gains)
        gains = self._gains[..., None] + gains.clamp(max=0.0)
        gains = gains.masked_fill((level >= self._depths)[:, None, None], -torch.inf).flatten(1)
        tokens = self._ids[index].flatten(1)
        begin = sum(each.shape[1] for each, _, _ in self._grown)
        self._grown.append((tokens, self._frontier.repeat_interleave(index.shape[-1], 1), gains))
        best = gains.sort(dim=-1, descending=True, stable=True).indices[:, :branch]
        self._frontier, self._gains = begin + best, gains.gather(-1, best)
        return tokens.gather(-1, best), best // index.shape[-1]

    def ranked(self) -> Tensor:
        """float64 [3 * B * n + 1]: the likeliest ``nodes`` of all of each row, parents before their children, as
        tokens, parents and gains; then whether all logits were finite."""
        tokens, parents, gains = (torch.cat(each, 1) for each in zip(*self._grown, strict=True))
        order = gains.sort(dim=-1, descending=True, stable=True).indices[:, : self._bucket.nodes]
        place = torch.full_like(parents, -1).scatter(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        above = parents.gather(-1, order)
        above = torch.where(above < 0, above, place.gather(-1, above.clamp(min=0)))
        every = torch.stack([tokens.gather(-1, order).double(), above.double(), gains.gather(-1, order)])
        return torch.cat([every.flatten(), self._finite[None].double()])


def drafts_of(asks: Sequence[Ask], ranked: npt.NDArray[np.float64], rows: int) -> Drafts:
    """Of ``Trees.ranked``. Raises NotFiniteError."""
    if not ranked[-1]:
        raise NotFiniteError("the drafter's network produced NaN or infinite logits: check its weights")
    found = []
    for ask, (token, parent, gain) in zip(asks, ranked[:-1].reshape(3, rows, -1).swapaxes(0, 1), strict=False):
        n = min(ask.nodes, int((gain > -np.inf).sum()))
        nodes = token[:n].astype(int).tolist(), parent[:n].astype(int).tolist(), np.exp(gain[:n]).tolist()
        found.append(Draft(*nodes, [0] * n))
    return Drafts.of(found, ())


def grown(
    asks: Sequence[Ask], ids: Tensor, logits: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]
) -> Drafts:
    """Drafts of networks that know what comes at every depth without a forward a level: the likeliest trees (DDTree,
    arXiv 2604.12989), or chains where ``branch`` is 1.

    ``logits(level, tokens, parents)``: [B, m, D] after each of the level's m nodes, tokens int64 [B, m] whose parents
    int64 [B, m] are counted within the level before; [B, 1, D] where all of them go on alike; and how likely the
    likeliest of these is to be accepted [B, m], where a head says so. At first there is one node, the pending token,
    -1. Raises NotFiniteError.
    """
    depths = [min(ask.levels, ask.nodes) for ask in asks]
    nodes = max(ask.nodes for ask in asks)
    branch = min(nodes, len(ids)) if asks[0].branch > 1 else 1
    bucket = Bucket(len(asks), 0, 0, max(depths), branch, nodes, noise_of(asks))
    (packed,) = uploaded(ids.device, np.concatenate([np.array([depths], np.int64), choices(asks)]))
    trees = Trees(bucket, ids, packed[0], packed[1].bool(), Asked.of(packed[2:]))
    tokens = parents = torch.full((len(asks), 1), -1, dtype=torch.int64, device=ids.device)
    for level in range(bucket.levels):
        found, sure = logits(level, tokens, parents)
        tokens, parents = trees.add(found.float().expand(-1, tokens.shape[1], -1), level, sure)
    return drafts_of(asks, trees.ranked().cpu().numpy(), len(asks))


def noisy(logits: Tensor, asked: Asked, ids: Tensor, k: int, filtered: bool) -> tuple[Tensor, Tensor]:
    """Indices int64 [n, k] of logits float32 [n, D] and their gains: see ``picks.chosen``."""
    index, scaled = kept(logits, asked, filtered)
    scores = scaled + rough_gumbel(ids[index], asked)
    best, at = scores.topk(min(max(k, RIVALS), scores.shape[-1]), -1)
    gains = best - best[:, :1]
    gains = gains - gains.logsumexp(-1, keepdim=True)
    return index.expand_as(scores).gather(-1, at[:, :k]), gains[:, :k]
