"""``merge`` of exact/drafts.py in plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from outpace.exact.drafts import Draft


def merge(proposals: Sequence[Draft], budget: int) -> Draft:
    """The merged tree."""
    tokens: list[int] = []
    gains: list[float] = []
    sources: list[int] = []
    children: list[dict[int, int]] = [{}]  # of the pending token, then of each node: token -> node
    for tree in proposals:
        place: list[int] = []  # each node's index in the union
        for token, parent, gain, source in zip(tree.tokens, tree.parents, tree.gains, tree.sources, strict=True):
            siblings = children[place[parent] + 1 if parent >= 0 else 0]
            node = siblings.get(token)
            if node is None:
                node = siblings[token] = len(tokens)
                tokens.append(token)
                gains.append(gain)
                sources.append(source)
                children.append({})
            elif gain > gains[node]:
                gains[node], sources[node] = gain, source
            place.append(node)
    merged = Draft()
    heap = [(-gains[node], node, -1) for node in children[0].values()]
    heapq.heapify(heap)
    while heap and len(merged) < budget:
        gain, node, parent = heapq.heappop(heap)
        at = merged.add(tokens[node], parent, -gain, sources[node])
        for child in children[node + 1].values():
            heapq.heappush(heap, (max(gain, -gains[child]), child, at))
    return merged
