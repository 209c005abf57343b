"""``medusa:PATH``: heads on the target's last hidden state fill a static tree (Medusa-1, arXiv 2401.10774).

The state of position i has seen token i; head k, from 0, says token i + 2 + k. So a row of L committed tokens is
drafted for from the state of position L - 2, and nothing else of it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from outpace.arrays import F32, I32
from outpace.drafters.base import Drafter, DrafterNeeds, Event, RowView, levels
from outpace.drafters.learned import trees
from outpace.drafters.learned.picks import chosen, likeliest
from outpace.errors import DrafterError, NotFiniteError
from outpace.exact.drafts import Drafts
from outpace.exact.tree import Tree, pack

NODES, RANKS = 64, 10  # of a tree for checkpoints without one
# Assumed of such checkpoints: how often a head's first candidate is right, by head; and each next one against it.
FIRST, NEXT = 0.6, 0.35


Candidates = tuple[list[int], list[float]]  # of a head: indices into the draft vocabulary, logarithms of chances


class Heads(Protocol):
    """What computes the heads' logits."""

    ids: I32  # the target's token ids [D] of the draft vocabulary, ascending

    def logits(self, states: Sequence[Any]) -> F32:
        """float32 [B, K, D] on the host, of the last layer's outputs [H] in the arrays of the target's backend. A row's
        do not depend on the others."""


class MedusaDrafter(Drafter):
    """The first nodes of ``tree`` (paths of ranks; none: one for heads that grow worse) that a row's size allows.

    Under ``coupled``, a row that samples shares its noise: candidates are those of the largest log q + g. Under
    ``rejection`` candidates are the likeliest, whatever the temperature: nothing is drawn, so q is one-hot.
    ``layer``: the target's last one. Raises DrafterError for a tree with a path that does not follow its beginning.
    """

    def __init__(self, heads: Heads, count: int, tree: Sequence[trees.Path], layer: int, name: str) -> None:
        self.name, self._heads, self._levels = name, heads, count
        self.needs = DrafterNeeds(taps=(layer,))
        self._tree = tuple(tree) or assumed(count)
        seen: set[trees.Path] = {()}
        for path in self._tree:
            if path[:-1] not in seen or path in seen or len(path) > count:
                raise DrafterError(
                    f"{name}: the tree's path {list(path)} stands twice, is longer than its {count} heads, or does not "
                    "follow its beginning: search the tree anew, or export the drafter without one"
                )
            seen.add(path)
        self._ranks = max(max(path) for path in self._tree) + 1
        self._rows: dict[int, tuple[int, Any]] = {}  # the position of the pending token, and the state before it [H]

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.taps is not None and len(event.taps):  # a copy: a view would keep a whole forward's states
                last = event.taps.at(np.array([len(event.taps) - 1], np.int32)).native[0, 0]
                self._rows[event.row] = event.start - 1 + len(event.taps), last

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        ready = [i for i, view in enumerate(rows) if self._rows.get(view.row, (-1,))[0] == len(view.tokens) - 1]
        if not ready:
            return Drafts.empty(len(rows))
        logits = self._heads.logits([self._rows[rows[i].row][1] for i in ready])
        if not np.isfinite(logits).all():
            raise NotFiniteError("the drafter's heads produced NaN or infinite logits: check its weights")
        depth = levels(rows, sizes).tolist()
        grown = [self._grow(rows[i], its, int(sizes[i]), depth[i]) for i, its in zip(ready, logits, strict=True)]
        return pack(grown, (self.name,)).among(ready, len(rows))

    def _grow(self, view: RowView, logits: F32, size: int, depth: int) -> Tree:
        """The row's tree of logits float32 [K, D]; gains are path probabilities."""
        noisy = view.acceptance != "rejection" and not view.chooser.params.greedy
        ids, k = self._heads.ids, self._ranks
        found = [
            chosen(its, ids, view.chooser, level, k) if noisy else likeliest(its, k)
            for level, its in enumerate(logits[:depth])
        ]
        return filled(self._tree, found, ids, size)

    def fork(self, src: int, dst: int, n: int) -> None:
        self.release(dst)
        if src in self._rows and self._rows[src][0] == n - 1:
            self._rows[dst] = self._rows[src]

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._rows.pop(row, None)

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"

    def close(self) -> None:
        self._rows.clear()


def filled(tree: Sequence[trees.Path], found: Sequence[Candidates], ids: I32, size: int) -> Tree:
    """The first ``size`` nodes of a tree, each path after its beginning, that ``found`` has candidates for, by head.

    ``ids`` int32 [D]: the target's of the draft vocabulary. Gains are path probabilities.
    """
    grown, place = Tree(), dict[trees.Path, int]({(): -1})
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


def assumed(heads: int) -> tuple[trees.Path, ...]:
    """A tree of ``NODES`` for heads of which nothing was measured."""
    first = FIRST ** np.arange(1, heads + 1)
    accuracy = first[:, None] * NEXT ** np.arange(RANKS)[None, :]
    return trees.search(trees.gains_of_accuracy(accuracy), NODES, heads, RANKS)
