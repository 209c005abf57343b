"""``retrieval:PATH``: what followed in a datastore, wherever it ends like the sequence (REST, arXiv 2311.08252).

Places vote for what comes next with weights that grow with the length of their match; the tree has the nodes of
highest estimated path probability. Stateless: the datastore is shared, and a row leaves nothing behind. Where
native/drafting/datastore.h was built it searches and counts; the Python here gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from outpace.arrays import I32
from outpace.drafters.base import RowView, TreeDrafter
from outpace.drafters.lookup.datastore import DEPTH, Datastore
from outpace.drafters.lookup.votes import grow
from outpace.errors import DrafterError
from outpace.exact.tree import Tree

try:
    from outpace._native import Datastore as _Search
except ImportError:  # no extension, or one from before it had this search: the reference, slower
    _Search = None  # type: ignore[assignment,misc]

# Odds that one place with a match of 0, 1, 2, ... tokens is right; DOUBT is "something else" (docs/notebook.md).
WEIGHTS = (0.0, 0.03, 0.06, 0.12, 0.25, 0.4, 0.6, 0.9, 1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0)
DOUBT = 0.4


class RetrievalDrafter(TreeDrafter):
    """``places``: how many places of the datastore vote, those with the longest matches; ``least``: tokens that a match
    has at least. Raises DrafterError."""

    name = "retrieval"

    def __init__(self, datastore: Datastore, places: int = 24, least: int = 2) -> None:
        if not 1 <= places <= 1024:
            raise DrafterError(f"retrieval: places={places} is out of range: give 1 to 1024")
        if not 1 <= least <= DEPTH:
            raise DrafterError(f"retrieval: min={least} is out of range: give 1 to {DEPTH} tokens")
        self._datastore, self._places, self._least = datastore, places, least
        self._search = None if _Search is None else _Search(datastore.arrays, WEIGHTS, DOUBT)

    def trees(self, rows: Sequence[RowView], sizes: Sequence[int]) -> list[Tree]:
        return [self._tree(view.tokens[-DEPTH:], size) for view, size in zip(rows, sizes, strict=True)]

    def _tree(self, context: I32, size: int) -> Tree:
        if self._search is None:
            return look_up(self._datastore, context.tolist(), self._places, self._least, size)
        found = self._search.propose(context, self._places, self._least, size)
        return Tree(*found, [0] * len(found[0]))


def look_up(datastore: Datastore, context: Sequence[int], places: int, least: int, budget: int) -> Tree:
    """What follows ``context`` in a datastore, by the votes of at most ``places`` places."""
    found = [p for p in datastore.places(context, places, budget) if p.length >= least]
    return grow([(p.following, 0, p.length) for p in found], WEIGHTS, DOUBT, budget)
