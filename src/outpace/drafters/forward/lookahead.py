"""``lookahead``: the target drafts for itself, in the forward that verifies (lookahead decoding, arXiv 2402.02057).

A window of guesses for the next ``window`` positions is refined by Jacobi iteration, ``ngram - 1`` generations deep.
Its nodes are part of the draft: generation 0 is a chain, and the token of generation g in column i hangs under that of
generation g - 1, so it sees generation 0 up to its column and its own ancestors. What the target says after the last
generation makes each column an n-gram; n-grams go to a pool, and those that begin with the pending token are the
guesses that stand beside the window. Window nodes may be accepted as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outpace.common.arrays import I32
from outpace.drafters.base import DraftContext, DraftCost, Drafter, DrafterNeeds, Event, RowView
from outpace.drafters.spec import DrafterSpec
from outpace.errors import Argument, DrafterError
from outpace.exact.drafts import Draft, Drafts
from outpace.params import Acceptance

POOL = 4096  # first tokens a row remembers n-grams of
SURE, UNSURE = 0.3, 0.02  # what a guess and a window node are taken to be worth, a level


@dataclass(slots=True)
class _Row:
    request: int
    # [g][column], at position pending + 1 + column + g; None: nothing was generated there yet
    generations: list[list[int | None]] = field(default_factory=list)
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)  # newest last
    leaves: list[int] = field(default_factory=list)  # the draft's node of the last generation, by column
    drafted: list[list[int]] = field(default_factory=list)  # the window as it was drafted
    nodes: int = 0  # in the draft


class LookaheadDrafter(Drafter):
    """``window`` columns, n-grams of ``ngram`` tokens, at most ``guesses`` of them a step. Raises DrafterError."""

    name = "lookahead"
    needs = DrafterNeeds(choices=True)
    cost = DraftCost(trims=False)  # a window is of use as a whole

    def __init__(self, window: int = 4, ngram: int = 3, guesses: int = 3) -> None:
        for name, value, low, high in (("window", window, 1, 32), ("ngram", ngram, 2, 8), ("guesses", guesses, 1, 32)):
            if not low <= value <= high:
                raise DrafterError(f"lookahead: {name}={value} is out of range: give {low} to {high}")
        self._window, self._ngram, self._guesses = window, ngram, guesses
        self._rows: dict[int, _Row] = {}

    def check_acceptance(self, acceptance: Acceptance) -> None:
        if acceptance == "rejection":
            raise DrafterError(
                "lookahead drafts from the target's own choices, so under rejection it would not be exact: use ",
                Argument("acceptance", "coupled"),
            )

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        trees = [self._tree(view, int(size)) for view, size in zip(rows, sizes, strict=True)]
        return Drafts.of(trees, (self.name,))

    def _tree(self, view: RowView, size: int) -> Draft:
        row = self._rows.get(view.row)
        if row is None or row.request != view.request:
            row = self._rows[view.row] = _Row(view.request)
        tree = Draft()
        children: dict[tuple[int, int], int] = {}  # (parent, token) -> node: equal siblings are one node

        def add(token: int, parent: int, worth: float) -> int:
            node = children.get((parent, token))
            if node is None:
                above = tree.gains[parent] if parent >= 0 else 1.0
                node = children[parent, token] = tree.add(token, parent, above * worth)
            return node

        for guess in list(reversed(row.pool.get(int(view.tokens[-1]), ())))[: self._guesses]:
            if len(tree) + len(guess) > min(size, max(size // 2, self._ngram - 1)):
                break  # the window needs the other half: without it no n-gram is found
            parent = -1
            for token in guess:
                parent = add(token, parent, SURE)
        window = self._seeded(row, view.tokens)
        columns = min(self._window, (size - len(tree)) // len(window))
        row.drafted = [generation[:columns] for generation in window]
        row.leaves = []
        first = -1
        for column in range(columns):
            first = leaf = add(window[0][column], first, UNSURE)
            for generation in window[1:]:
                leaf = add(generation[column], leaf, UNSURE)
            row.leaves.append(leaf)
        row.nodes = len(tree)
        return tree

    def _seeded(self, row: _Row, tokens: I32) -> list[list[int]]:
        """The window, with tokens of the sequence where it is short or unknown: likelier than random ones."""
        known = tokens.tolist()

        def token(g: int, column: int) -> int:
            generated = row.generations[g][column] if column < len(row.generations[g]) else None
            return int(known[-1 - (7 * (column + 1) + 3 * g) % len(known)]) if generated is None else generated

        if not row.generations:
            row.generations.append([])
        window = [[token(g, column) for column in range(self._window)] for g in range(len(row.generations))]
        row.generations = [list(generation) for generation in window]
        return window

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            row = self._rows.get(event.row)
            if row is None or event.verdict is None:
                continue
            choices = event.choices
            # The policy may have dropped the draft: then its nodes have no choices.
            aged = False
            if choices is not None and len(choices) == row.nodes + 1 and row.leaves:
                aged = self._refine(row, choices)
            # The pending token moved on; a window that gave its oldest generation up has moved by one already.
            drop = max(len(event.tokens) - aged, 0)
            row.generations = [generation[drop:] for generation in row.generations]
            row.leaves = []

    def _refine(self, row: _Row, choices: I32) -> bool:
        """One Jacobi step: what the target says after each column's last node is its next generation.

        ``choices`` int32 [k + 1] are those after the pending token and the nodes as they were proposed; -1 where there
        is none, since a rule forbids the node, or nothing may follow it: such a column says nothing. Returns whether
        the oldest generation was given up.
        """
        fresh = [None if choices[leaf + 1] < 0 else int(choices[leaf + 1]) for leaf in row.leaves]
        full = len(row.drafted) == self._ngram - 1
        if full:
            for column, last in enumerate(fresh):
                first, *rest = (generation[column] for generation in row.drafted)
                if last is not None:
                    self._remember(row, first, (*rest, last))
            row.generations = [*row.generations[1:], fresh]
        else:
            row.generations.append(fresh)
        return full

    def _remember(self, row: _Row, first: int, rest: tuple[int, ...]) -> None:
        continuations = row.pool.setdefault(first, OrderedDict())
        row.pool.move_to_end(first)
        continuations[rest] = None
        continuations.move_to_end(rest)
        while len(continuations) > self._guesses:
            continuations.popitem(last=False)
        while len(row.pool) > POOL:
            row.pool.popitem(last=False)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._rows.pop(row, None)

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._rows) <= set(rows), f"rows {set(self._rows) - set(rows)} were never released"


def build(spec: DrafterSpec, context: DraftContext) -> LookaheadDrafter:
    drafter = LookaheadDrafter(**spec.given(window="window", ngram="ngram", guesses="guesses"))
    drafter.check_acceptance(context.acceptance)
    return drafter
