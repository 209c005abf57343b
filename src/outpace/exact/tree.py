"""Token trees: shapes, and merging what several proposals say into one tree, best expected gain first.

A node's gain is the estimated probability that it is accepted, that is: of its whole path from the pending token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outpace import _fast
from outpace.arrays import F32, I32
from outpace.exact.drafts import Draft, Drafts, is_chain

Lists = tuple[list[int], list[int], list[float], list[int]]  # a Tree's


@dataclass(slots=True)
class Tree:
    """One row's proposal while it is put together: k nodes, parents before children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # never more than the parent's
    sources: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, gain: float, source: int = 0) -> int:
        """Append a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.gains.append(gain)
        self.sources.append(source)
        return len(self.tokens) - 1

    @staticmethod
    def chain(tokens: Sequence[int], gains: Sequence[float], source: int = 0) -> Tree:
        """A path of k tokens with its gains [k]."""
        return Tree(list(tokens), list(range(-1, len(tokens) - 1)), list(gains), [source] * len(tokens))

    @staticmethod
    def of(draft: Draft, gains: Sequence[float], source: int = 0) -> Tree:
        """A draft of k nodes with its gains [k]."""
        parents = list(range(-1, len(draft) - 1)) if draft.parents is None else draft.parents.tolist()
        return Tree(draft.tokens.tolist(), parents, list(gains), [source] * len(draft))


def merge(proposals: Sequence[Tree], budget: int) -> Tree:
    """The ``budget`` nodes of most gain of all proposals together, best first, parents before children.

    Equal siblings become one node, since ``verify.walk`` follows only the first of them; its gain is the highest that
    any proposal gives it, and its source that proposal's. A gain above the parent's is cut to it. Ties: the node that
    was proposed first. Deterministic.
    """
    return Tree(*_merge(list(proposals), budget))


def merge_reference(proposals: Sequence[Tree], budget: int) -> Lists:
    """``merge`` without the extension: the merged tree's lists."""
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
    return merged.tokens, merged.parents, merged.gains, merged.sources


_merge = _fast.pick("merge", merge_reference)


def pack(trees: Sequence[Tree], sources: tuple[str, ...]) -> Drafts:
    """One tree a row as ``Drafts``; chains when every tree is one. ``sources``: names of the trees' source numbers."""
    tokens, widths, parents, confidence, source = _pack(list(trees), len(sources) > 1)
    return Drafts(tokens, widths, parents, confidence=confidence, source=source, sources=sources)


def pack_reference(
    trees: Sequence[Tree], sourced: bool
) -> tuple[I32, I32, I32 | None, F32, npt.NDArray[np.uint8] | None]:
    """``pack`` without the extension: tokens, widths, parents, confidence and, if ``sourced``, source."""
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


_pack = _fast.pick("pack_trees", pack_reference)
