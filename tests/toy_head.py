"""A learned drafter's network for ``ToyModel``: it holds its caller to what entries are, and guesses well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from outpace.common.arrays import F32, I32
from outpace.drafters.learned.drafter import KV, Ask, Network
from outpace.drafters.learned.picks import chosen, likeliest
from outpace.errors import MemoryLimitError
from outpace.exact.drafts import Draft, Drafts
from tests.toy import BYTES, ToyModel


class ToyHead(Network, KV):
    """Entries are what the toy's hidden states say (a token and its position, twice) and the token that follows.

    What it predicts are the logits of ``model`` (of the draft vocabulary ``ids``) after all that its entries tell.
    ``limit``: entries in all rows.
    """

    def __init__(self, model: ToyModel, ids: Sequence[int], *, limit: int | None = None, max_length: int = 96) -> None:
        self.ids, self.max_length = np.array(ids, np.int32), max_length
        self.rows: dict[int, list[tuple[int, int, int]]] = {}  # token, its position, the token after it
        self.calls: list[tuple[str, int]] = []  # what was asked, and of how many rows
        self._model, self._limit, self._predicted = model, limit, dict[int, int]()  # from which entry on
        self.kv = self

    def feed(
        self, rows: Sequence[int], tokens: Sequence[I32], hidden_states: Sequence[Any], positions: Sequence[I32] = ()
    ) -> None:
        self.calls.append(("feed", len(rows)))
        assert len(set(rows)) == len(rows)
        if self._limit is not None and self.bytes + sum(map(len, tokens)) * BYTES > self._limit * BYTES:
            raise MemoryLimitError("full")
        for row, its, states in zip(rows, tokens, hidden_states, strict=True):
            entries = self.rows.setdefault(row, [])
            assert row not in self._predicted, "real entries behind predicted ones"
            assert states.shape == (len(its), 2, 2)
            assert (states[:, 0] == states[:, 1]).all()
            for (token, position), after in zip(states[:, 0].astype(int).tolist(), its.tolist(), strict=True):
                if entries:
                    assert position > entries[-1][1], "an entry twice, or out of order"
                    assert position > entries[-1][1] + 1 or token == entries[-1][2], "another text's entry"
                entries.append((token, position, after))
            assert len(entries) <= self.max_length

    def _logits(self, entries: list[tuple[int, int, int]], more: list[int]) -> F32:
        prefix = [0] * (entries[-1][1] + 2)
        for token, position, after in entries:
            prefix[position : position + 2] = token, after
        return self._model.logits_after([*prefix, *more])[self.ids]

    def draft(self, asks: Sequence[Ask]) -> Drafts:
        self.feed([a.row for a in asks], [a.tokens for a in asks], [a.hidden_states for a in asks])
        self.calls[-1] = "draft", len(asks)
        assert all(ask.nodes and ask.levels for ask in asks)
        trees = []
        for ask in asks:
            tree, paths = Growing(ask, self.ids), [list[int]()]
            for _ in range(ask.levels):
                tree.add(np.stack([self._logits(self.rows[ask.row], path) for path in paths]))
                frontier = tree.expand()
                if not frontier.tokens:
                    break
                paths = [[*paths[at], token] for at, token in zip(frontier.parents, frontier.tokens, strict=True)]
            trees.append(tree)
        return Drafts.of([tree.tree() for tree in trees], ())

    def extend(self, rows: Sequence[int], tokens: Sequence[I32], given: Sequence[Any]) -> tuple[F32, list[Any]]:
        real = [i for i, states in enumerate(given) if states is not None]
        self.feed([rows[i] for i in real], [tokens[i] for i in real], [given[i] for i in real])
        self.calls[-1] = "extend", len(rows)
        for row, its, states in zip(rows, tokens, given, strict=True):
            if states is None:
                self._predicted.setdefault(row, len(self.rows[row]))
                _, position, after = self.rows[row][-1]
                self.rows[row].append((after, position + 1, int(its[0])))
                assert len(its) == 1
        return np.stack([self._logits(self.rows[row], []) for row in rows]), [None] * len(rows)

    def length(self, row: int) -> int:
        return len(self.rows.get(row, ()))

    def truncate(self, row: int, n: int) -> None:
        assert n <= self.length(row)
        if row in self.rows:
            del self.rows[row][n:]
            if self._predicted.get(row, n) >= n:
                self._predicted.pop(row, None)

    def fork(self, src: int, dst: int, n: int) -> None:
        assert 0 < n <= self._predicted.get(src, self.length(src))
        assert dst not in self.rows
        self.rows[dst] = self.rows[src][:n]

    def release(self, row: int) -> None:
        self.rows.pop(row, None)
        self._predicted.pop(row, None)

    def growth(self, row: int, positions: int) -> int:
        return max(positions - self.length(row), 0) * BYTES

    @property
    def bytes(self) -> int:
        return sum(map(len, self.rows.values())) * BYTES

    def check(self, rows: Sequence[int]) -> None:
        assert set(self.rows) <= set(rows)
        assert set(self._predicted) <= set(self.rows)

    def close(self) -> None:
        self.rows.clear()
        self._predicted.clear()


class Frontier(NamedTuple):
    """Nodes to expand: their tokens, and where in the frontier before each one's parent stands."""

    tokens: list[int]
    parents: list[int]


class Growing:
    """The tree (or chain) of one ``ask``. ``ids`` int32 [D]: the target's ids of the draft vocabulary, ascending."""

    def __init__(self, ask: Ask, ids: I32) -> None:
        self._ask, self._ids = ask, ids
        self._levels = min(ask.levels, ask.nodes)
        self._chooser = None if ask.chooser is None or ask.chooser.params.greedy else ask.chooser
        self._tree = Draft()  # of all candidates; gains are logarithms
        self._frontier: list[int] = [-1]
        self._columns: list[int] = [-1]  # nodes whose forward came last
        self._level = 0

    def add(self, logits: F32) -> None:
        """Children of the frontier's nodes, of logits float32 [m, D]."""
        if self._level >= self._levels:
            self._frontier = []
            return
        branch, chooser = self._ask.branch, self._chooser
        found = [
            likeliest(row, branch) if chooser is None else chosen(row, self._ids, chooser, self._level, branch)
            for row in logits
        ]
        begin = len(self._tree)
        for node, (children, logarithms) in zip(self._frontier, found, strict=True):
            above = self._tree.gains[node] if node >= 0 else 0.0
            for token, gain in zip(children, logarithms, strict=True):
                self._tree.add(int(self._ids[token]), node, above + min(gain, 0.0))
        self._level += 1
        self._frontier = list(range(begin, len(self._tree)))

    def expand(self) -> Frontier:
        """What the next level's forward is of: the likeliest of the last level's nodes; none where it was the last."""
        before = self._tree.parents
        if self._level >= self._levels:
            self._frontier = []
        ranked = sorted(self._frontier, key=lambda n: -self._tree.gains[n])[: self._ask.branch]
        columns = {node: j for j, node in enumerate(self._columns)}
        self._columns = self._frontier = ranked
        return Frontier([self._tree.tokens[n] for n in ranked], [columns[before[n]] for n in ranked])

    def tree(self) -> Draft:
        """The ``nodes`` likeliest of all, parents before their children; gains are path probabilities."""
        grown = self._tree
        best = sorted(range(len(grown)), key=lambda n: -grown.gains[n])[: self._ask.nodes]
        kept, place = Draft(), {-1: -1}
        for node in best:
            place[node] = kept.add(grown.tokens[node], place[grown.parents[node]], float(np.exp(grown.gains[node])))
        return kept
