"""Token trees: shapes, and merging what several proposals say into one tree, best expected gain first.

A node's gain is the estimated probability that it is accepted, that is: of its whole path from the pending token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace import _fast
from outpace.exact.drafts import Draft, Drafts


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
    return Tree(*_fast.native.merge(list(proposals), budget))


def pack(trees: Sequence[Tree], sources: tuple[str, ...]) -> Drafts:
    """One tree a row as ``Drafts``; chains when every tree is one. ``sources``: names of the trees' source numbers."""
    tokens, widths, parents, confidence, source = _fast.native.pack_trees(list(trees), len(sources) > 1)
    return Drafts(tokens, widths, parents, confidence=confidence, source=source, sources=sources)
