"""``merge`` and ``pack`` of exact/tree.py in plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import F32, I32
from outpace.exact.drafts import is_chain
from outpace.exact.tree import Tree


def merge(proposals: Sequence[Tree], budget: int) -> Tree:
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
    merged = Tree()
    heap = [(-gains[node], node, -1) for node in children[0].values()]
    heapq.heapify(heap)
    while heap and len(merged) < budget:
        gain, node, parent = heapq.heappop(heap)
        at = merged.add(tokens[node], parent, -gain, sources[node])
        for child in children[node + 1].values():
            heapq.heappush(heap, (max(gain, -gains[child]), child, at))
    return merged


def pack(trees: Sequence[Tree], sourced: bool) -> tuple[I32, I32, I32 | None, F32, npt.NDArray[np.uint8] | None]:
    """Tokens, widths, parents, confidence and, if ``sourced``, source."""
    b, w = len(trees), max((len(tree) for tree in trees), default=0)
    tokens, parents = np.zeros((b, w), np.int32), np.full((b, w), -1, np.int32)
    confidence: F32 = np.zeros((b, w), np.float32)
    source = np.zeros((b, w), np.uint8)
    for i, tree in enumerate(trees):
        k = len(tree)
        tokens[i, :k], parents[i, :k] = tree.tokens, tree.parents
        confidence[i, :k], source[i, :k] = tree.gains, tree.sources
    chains = all(is_chain(tree.parents) for tree in trees)
    widths = np.array([len(tree) for tree in trees], np.int32)
    return tokens, widths, None if chains else parents, confidence, source if sourced else None
