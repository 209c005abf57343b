"""``retrieval:PATH``: what followed in a datastore, wherever it ends like the sequence (REST, arXiv 2311.08252).

Places vote for what comes next with weights that grow with the length of their match; the tree has the nodes of highest
estimated path probability. Stateless: the datastore is shared, and a row leaves nothing behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outpace.drafters.base import Drafter, RowView
from outpace.drafters.datastore import DEPTH, Datastore, Place
from outpace.errors import DrafterError
from outpace.tree import Tree, pack
from outpace.types import I32, Drafts

# Odds that one place with a match of 0, 1, 2, ... tokens is right; DOUBT is "something else" (docs/notebook.md).
WEIGHTS = (0.0, 0.03, 0.06, 0.12, 0.25, 0.4, 0.6, 0.9, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
DOUBT = 0.4


class RetrievalDrafter(Drafter):
    """``places``: how many places of the datastore vote, those with the longest matches; ``least``: tokens that a match
    has at least. Raises DrafterError."""

    name = "retrieval"

    def __init__(self, datastore: Datastore, places: int = 24, least: int = 2) -> None:
        if not 1 <= places <= 1024:
            raise DrafterError(f"retrieval: places={places} is out of range: give 1 to 1024")
        if not 1 <= least <= DEPTH:
            raise DrafterError(f"retrieval: min={least} is out of range: give 1 to {DEPTH} tokens")
        self._datastore, self._places, self._least = datastore, places, least

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        trees = []
        for view, size in zip(rows, sizes.tolist(), strict=True):
            context = view.tokens[-DEPTH:].tolist()
            found = self._datastore.places(context, self._places, size)
            trees.append(grow([place for place in found if place.length >= self._least], size))
        return pack(trees, (self.name,))


def grow(places: Sequence[Place], budget: int) -> Tree:
    """The ``budget`` nodes of highest path probability, best first."""
    tree = Tree()
    heap: list[tuple[float, int, int, int, list[Place]]] = []  # -probability, order, parent, token, its places
    order = 0
    node, probability, depth, here = -1, 1.0, 0, list(places)
    depths: list[int] = []
    while True:
        votes: dict[int, list[Place]] = {}
        for place in here:
            if depth < len(place.following):
                votes.setdefault(place.following[depth], []).append(place)
        weights = {token: sum(_weight(place.length + depth) for place in voters) for token, voters in votes.items()}
        total = DOUBT + sum(weights.values())
        for token, weight in weights.items():
            order += 1
            heapq.heappush(heap, (-probability * weight / total, order, node, token, votes[token]))
        if not heap or len(tree) >= budget:
            return tree
        negative, _, parent, token, here = heapq.heappop(heap)
        probability = -negative
        node = tree.add(token, parent, probability)
        depth = depths[parent] + 1 if parent >= 0 else 1
        depths.append(depth)


def _weight(length: int) -> float:
    return WEIGHTS[min(length, len(WEIGHTS) - 1)]
