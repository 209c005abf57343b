"""``medusa:PATH``: heads on the target's last hidden state fill a static tree (Medusa-1, arXiv 2401.10774).

The state of position i has seen token i; head k, from 0, says token i + 2 + k. So a row of L committed tokens is
drafted for from the state of position L - 2, and nothing else of it is kept.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.drafter import Ask, Network
from outpace.drafters.learned.picks import chosen, likeliest
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Draft, Drafts

NODES, RANKS = 64, 10  # of a tree for checkpoints without one
# Assumed of such checkpoints: how often a head's first candidate is right, by head; and each next one against it.
FIRST, NEXT = 0.6, 0.35


Path = tuple[
    int, ...
]  # of ranks: (r0, r1, ...) takes head 0's candidate of rank r0, then head 1's of rank r1, and so on
Candidates = tuple[list[int], list[float]]  # of a head: indices into the draft vocabulary, logarithms of chances


class HeadsNetwork(Network):
    """The first nodes of ``tree`` (paths of ranks) that a row's size allows.

    Under ``rejection`` candidates are the likeliest, whatever the temperature: nothing is drawn, so q is one-hot.
    """

    stepwise, latest, draws = False, True, False

    def __init__(self, ids: I32, heads: int, tree: Sequence[Path]) -> None:
        self.ids, self.most_levels, self.tree = ids, heads, tuple(tree)
        self._ranks = max(max(path) for path in self.tree) + 1

    def logits(self, states: Sequence[Any]) -> F32:
        """float32 [B, K, D] on the host, of the last layer's outputs [h] before B pending tokens, in the arrays of the
        target's backend. A row's do not depend on the others."""
        raise NotImplementedError

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        logits = self.logits([ask.hidden_states[-1, 0] for ask in asks])
        if not np.isfinite(logits).all():
            raise NotFiniteError("the drafter's heads produced NaN or infinite logits: check its weights")
        return Drafts.of([self._grow(ask, heads) for ask, heads in zip(asks, logits, strict=True)])

    def _grow(self, ask: Ask, logits: F32) -> Draft:
        """The row's tree of logits float32 [K, D]; gains are path probabilities."""
        chooser, ids, k = ask.chooser, self.ids, self._ranks
        candidates = [
            likeliest(head, k) if chooser is None or chooser.params.greedy else chosen(head, ids, chooser, level, k)
            for level, head in enumerate(logits[: ask.levels])
        ]
        return filled(self.tree, candidates, ids, ask.nodes)


def filled(tree: Sequence[Path], found: Sequence[Candidates], ids: I32, size: int) -> Draft:
    """The first ``size`` nodes of a tree, each path after its beginning, that ``found`` has candidates for, by head.

    ``ids`` int32 [D]: the target's of the draft vocabulary. Gains are path probabilities.
    """
    grown, place = Draft(), dict[Path, int]({(): -1})
    for path in tree:
        if len(grown) == size:
            break
        level, rank = len(path) - 1, path[-1]
        if path[:-1] not in place or level >= len(found) or rank >= len(found[level][0]):
            continue
        tokens, gains = found[level]
        parent = place[path[:-1]]
        above = grown.gains[parent] if parent >= 0 else 1.0
        place[path] = grown.add(int(ids[tokens[rank]]), parent, above * float(np.exp(min(gains[rank], 0.0))))
    return grown


def assumed(heads: int) -> tuple[Path, ...]:
    """A tree of ``NODES`` for heads of which nothing was measured."""
    first = FIRST ** np.arange(1, heads + 1)
    accuracy = first[:, None] * NEXT ** np.arange(RANKS)[None, :]
    return search(gains_of_accuracy(accuracy), NODES, heads, RANKS)


def tree_of(name: str, tree: Sequence[Path], heads: int) -> tuple[Path, ...]:
    """A checkpoint's static tree; where it has none, one for heads that grow worse. Raises DrafterError for a tree with
    a path that does not follow its beginning."""
    seen: set[Path] = {()}
    for path in tree:
        if path[:-1] not in seen or path in seen or len(path) > heads:
            raise DrafterError(
                f"{name}: the tree's path {list(path)} stands twice, is longer than its {heads} heads, or does not "
                "follow its beginning: search the tree anew, or export the drafter without one"
            )
        seen.add(path)
    return tuple(tree) or assumed(heads)


# -- which static tree is worth verifying ------------------------------------------------------------------------------
# A path's gain is the chance that all of it is accepted; a tree's tokens a step are 1 + the sum of its paths' gains. No
# path gains more than its beginning, so taking the best path next, whose beginning is there, gives the best tree of
# every size.


def search(gain: Callable[[Path], float], nodes: int, heads: int, ranks: int) -> tuple[Path, ...]:
    """The best tree of at most ``nodes`` paths, of up to ``heads`` steps and ranks below ``ranks``, best path first.

    Every path stands after its beginning, so that the first n paths are the best tree of n. Paths that gain nothing
    are left out. Ties go to the shorter path, then to lower ranks.
    """
    found: list[Path] = []
    heap: list[tuple[float, int, Path]] = []

    def offer(parent: Path) -> None:
        if len(parent) < heads:
            for rank in range(ranks):
                path = (*parent, rank)
                worth = gain(path)
                if worth > 0:
                    heapq.heappush(heap, (-worth, len(path), path))

    offer(())
    while heap and len(found) < nodes:
        path = heapq.heappop(heap)[2]
        found.append(path)
        offer(path)
    return tuple(found)


def gains_of_accuracy(accuracy: npt.NDArray[np.float64]) -> Callable[[Path], float]:
    """A path's gain as the product of ``accuracy[head, rank]`` [K, R]: as arXiv 2401.10774 takes it."""
    return lambda path: float(np.prod([accuracy[head, rank] for head, rank in enumerate(path)]))


def gains_of_ranks(ranks: npt.NDArray[np.integer]) -> Callable[[Path], float]:
    """A path's gain as the share of ``ranks`` int [n, K] that begin with it: what was measured, heads together.

    ``ranks[i, k]``: the rank that head k gave to the target's token at start i; large where it is no candidate.
    """
    counts: Counter[Path] = Counter()
    for row in ranks.tolist():
        for depth in range(1, len(row) + 1):
            counts[tuple(row[:depth])] += 1
    total = max(1, len(ranks))
    return lambda path: counts[path] / total


def accepted(ranks: npt.NDArray[np.integer], tree: Sequence[Path]) -> npt.NDArray[np.int64]:
    """How many tokens of ``tree`` are accepted at each start of ``ranks`` int [n, K]: int64 [n]."""
    found = np.zeros(len(ranks), np.int64)
    for path in tree:
        fits = (ranks[:, : len(path)] == np.array(path)).all(1)
        found[fits] = np.maximum(found[fits], len(path))
    return found


def parents(tree: Sequence[Path]) -> list[int]:
    """Index of each path's beginning within the tree; -1 for those of one step."""
    at = {path: i for i, path in enumerate(tree)}
    return [at[path[:-1]] if len(path) > 1 else -1 for path in tree]
