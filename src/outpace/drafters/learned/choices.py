"""Which of a network's tokens become nodes: a row's draft while it grows, level by level (EAGLE-2, arXiv 2406.16858).

For networks in torch. What is chosen comes to the host; logits do only where the request's noise decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.arrays import I32
from outpace.drafters.learned.head import Ask
from outpace.drafters.learned.picks import chosen
from outpace.exact.drafts import Drafts
from outpace.exact.tree import Tree, pack


class Frontier(NamedTuple):
    """Nodes to expand: their tokens, and where in the frontier before each one's parent stands."""

    tokens: list[int]
    parents: list[int]


class Growing:
    """The tree (or chain) of one ``ask``. ``ids`` int32 [D]: the target's ids of the draft vocabulary, ascending."""

    def __init__(self, ask: Ask, ids: I32) -> None:
        self._ask, self._ids = ask, ids
        self._levels = min(ask.levels, ask.nodes)
        self._chooser = None if ask.chooser is None or ask.chooser.params.greedy else ask.chooser
        self._tree = Tree()  # of all candidates; gains are logarithms
        self._frontier: list[int] = [-1]
        self._columns: list[int] = [-1]  # nodes whose forward came last
        self._level = 0

    def add(self, logits: Tensor) -> None:
        """Children of the frontier's nodes, of logits float32 [m, D] (those beyond the frontier are padding)."""
        if self._level >= self._levels:
            self._frontier = []
            return
        its = logits[: len(self._frontier)]
        if self._chooser is None:
            tokens, gains = likeliest(its, self._ask.branch)
        else:
            found = [chosen(row, self._ids, self._chooser, self._level, self._ask.branch) for row in its.cpu().numpy()]
            tokens, gains = [t for t, _ in found], [g for _, g in found]
        begin = len(self._tree)
        for node, children, their in zip(self._frontier, tokens, gains, strict=True):
            above = self._tree.gains[node] if node >= 0 else 0.0
            for token, gain in zip(children, their, strict=True):
                self._tree.add(int(self._ids[token]), node, above + min(gain, 0.0))
        self._level += 1
        self._frontier = list(range(begin, len(self._tree)))

    def expand(self) -> Frontier:
        """What the next level's forward is of: the likeliest of the last level's nodes; none where it was the last."""
        before = self._tree.parents
        if self._level >= self._levels:
            self._frontier = []
        ranked = sorted(self._frontier, key=lambda n: -self._tree.gains[n])[: self._ask.branch]
        columns = {node: j for j, node in enumerate(self._columns)}
        self._columns = self._frontier = ranked
        return Frontier([self._tree.tokens[n] for n in ranked], [columns[before[n]] for n in ranked])

    def tree(self) -> Tree:
        """The ``nodes`` likeliest of all, parents before their children; gains are path probabilities."""
        grown = self._tree
        best = sorted(range(len(grown)), key=lambda n: -grown.gains[n])[: self._ask.nodes]
        kept, place = Tree(), {-1: -1}
        for node in best:
            place[node] = kept.add(grown.tokens[node], place[grown.parents[node]], float(np.exp(grown.gains[node])))
        return kept


def drafts_of(trees: Sequence[Growing]) -> Drafts:
    """What was drafted for a batch."""
    return pack([tree.tree() for tree in trees], ())


def likeliest(logits: Tensor, k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The ``k`` tokens of the largest logits of each row of float32 [m, D] (the lower on ties), best first, and the
    logarithms of their probabilities."""
    d = logits.shape[-1]
    bits = (logits + 0.0).contiguous().view(torch.int32)  # in the order of whole numbers, but for negative ones
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = ordered * (1 << 24) + torch.arange(d - 1, -1, -1, device=logits.device)
    best = keys.topk(min(k, d), -1).indices
    gains = logits.gather(-1, best) - logits.logsumexp(-1, keepdim=True)
    both = torch.stack([best.to(torch.float64), gains.to(torch.float64)]).cpu().numpy()
    tokens: list[list[int]] = both[0].astype(np.int64).tolist()
    return tokens, both[1].tolist()
