"""Which static tree is worth verifying: search over paths of ranks, from what was measured.

A path (r0, r1, ...) takes head 0's candidate of rank r0, then head 1's of rank r1, and so on. Its gain is the chance
that all of it is accepted; a tree's tokens a step are 1 + the sum of its paths' gains. No path gains more than its
beginning, so taking the best path next, whose beginning is there, gives the best tree of every size.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Path = tuple[int, ...]


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

    ``ranks[i, k]``: the rank that head k gave to what the target said at start i; large where it is no candidate.
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
