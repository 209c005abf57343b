"""``native/drafting/votes.h`` in plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outpace.drafters.lookup.datastore import END
from outpace.exact.drafts import Draft

Place = tuple[Sequence[int], int, int]  # tokens, index of what follows among them, length of the match


def grow(
    places: list[Place],
    weights: Sequence[float],
    doubt: float,
    budget: int,
    *,
    wide: bool = True,
    own: Sequence[int] | None = None,
) -> Draft:
    """The ``budget`` nodes of highest path probability, best first: a node is drafted, then its children are counted.

    Every place votes for what follows it with ``weights[length]`` (the last for all longer matches); ``doubt`` is the
    weight of "something else". ``wide=False``: only the likeliest path. ``own``: tokens that the context ends; a place
    that runs over their end goes on with what is drafted.
    """
    longest = len(weights) - 1
    tree = Draft()
    heap: list[tuple[float, int, int, int, list[int], list[Place]]] = []  # -probability, order, parent, token, ...
    order, node, probability = 0, -1, 1.0
    path: list[int] = []
    while True:
        total = doubt
        votes: dict[int, float] = {}
        groups: dict[int, list[Place]] = {}
        for held, at, length in places:
            if at < len(held):
                token = held[at]
                if token == END:
                    continue
            elif held is own and at - len(held) < len(path):
                token = path[at - len(held)]  # a loop: its next turn is what was drafted
            else:
                continue
            weight = weights[length] if length < longest else weights[longest]
            total += weight
            place = (held, at + 1, length + 1)
            if token in votes:
                votes[token] += weight
                groups[token].append(place)
            else:
                votes[token] = weight
                groups[token] = [place]
        scale = probability / total
        if not wide and votes:
            best = max(votes, key=votes.__getitem__)
            votes = {best: votes[best]}
        for token, weight in votes.items():
            order += 1
            heapq.heappush(heap, (-weight * scale, order, node, token, path, groups[token]))
        if not heap or len(tree) >= budget:
            return tree
        negative, _, parent, token, before, places = heapq.heappop(heap)
        probability = -negative
        node = tree.add(token, parent, probability)
        path = [*before, token]
