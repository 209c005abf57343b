"""``a+b+c``: what several drafters propose, merged into one tree under one budget, best expected gain first.

Under ``rejection`` a sampled proposal is a trial of its own: it may neither be merged with an equal token nor dropped
once it is drawn. So the deterministic parts are merged first, into half of the budget; what they leave, known before
anything is drawn, goes to the part that draws, and both stand side by side, the drawn one tried first (multi-candidate
rejection, SpecInfer, arXiv 2305.09781, algorithm 2, with each node's own q).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from outpace import _fast
from outpace.common.arrays import F64, I32
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, Event, RowView, TreeDrafter
from outpace.errors import Argument, DrafterError
from outpace.exact.drafts import Draft, Drafts, Verdict, merge
from outpace.params import Acceptance

ASSUMED = 0.7  # acceptance of a node whose drafter estimates none, given its parent's; native/drafting/draft.h, too
# A path of ``DEEP`` levels (or as many as another drafter would take forwards for) with this chance by a lookup's own
# word, which is modest: from 0.5 on such paths were accepted whole 20 times in 23; 0.35 was no slower.
SURE, DEEP = 0.35, 4


class ComposedDrafter(Drafter):
    """Candidates of 2 to 255 ``parts`` in one tree. Equal siblings count once, for the part that is surest of them.

    ``fallback`` [parts]: whether a part works only in rows where the parts before it have proposed nothing.
    """

    def __init__(self, parts: Sequence[Drafter], fallback: Sequence[bool] = ()) -> None:
        if not 2 <= len(parts) <= 255:
            raise DrafterError(f"a composition has {len(parts)} parts: join 2 to 255 drafters with +")
        for part in parts:
            if part.needs.choices:
                raise DrafterError(
                    f"{part.name} reads the choice after every node, which a merged tree cannot give it: use it alone"
                )
        self._fallback = tuple(fallback) or (False,) * len(parts)
        if self._fallback[0]:
            raise DrafterError(f"{parts[0].name} is the first part, so it can be no fallback: put it last")
        for j, part in enumerate(parts):
            if self._fallback[j] and not part.needs.draws and any(earlier.needs.draws for earlier in parts[:j]):
                raise DrafterError(f"{part.name} cannot be the fallback of a part that samples: put it first")
        self.parts = tuple(parts)
        self.name = "+".join(part.name for part in parts)
        self._names = tuple(part.name for part in parts)
        self.needs = DrafterNeeds(
            hidden_layers=tuple(sorted({layer for part in parts for layer in part.needs.hidden_layers})),
            draws=any(part.needs.draws for part in parts),
            ranks=max(part.needs.ranks for part in parts),
            target_rows=any(part.needs.target_rows for part in parts),
        )
        self._columns = [
            [self.needs.hidden_layers.index(layer) for layer in part.needs.hidden_layers] for part in parts
        ]
        self.retires = any(part.retires for part in parts)
        self.notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        levels = [part.cost.levels for part in parts if part.cost.levels is not None]
        self.cost = DraftCost(
            levels[0] if levels else None,
            nodes=bool(levels) and (len(levels) < len(parts) or any(part.cost.nodes for part in parts)),
        )
        if (
            type(self) is ComposedDrafter
            and sum(part.needs.draws for part in parts) < 2
            and all(part.native is not None and (part.native.hidden_layers or not part.observes) for part in parts)
        ):
            natives = [part.native for part in parts if part.native is not None]
            self.native = _fast.native.ComposedDrafter(natives, list(self._fallback), SURE, DEEP)
            self.names = self._names
        self._last: dict[int, dict[int, Draft]] = {}  # by row and part: what was proposed in this step, but for natives

    def check_acceptance(self, acceptance: Acceptance) -> None:
        for part in self.parts:
            part.check_acceptance(acceptance)
        drawing = [part.name for part in self.parts if part.needs.draws]
        if acceptance == "rejection" and len(drawing) > 1:
            raise DrafterError(
                f"{self.name}: {' and '.join(drawing)} both sample, with the same noise, so rejection would not be "
                "exact: keep one of them, or use ",
                Argument("acceptance", "coupled"),
            )

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        exact = [self.needs.draws and v.acceptance == "rejection" and not v.chooser.params.greedy for v in rows]
        trees: dict[int, list[Draft]] = {}  # what each part proposes, by row
        whole: dict[int, Drafts] = {}  # the same, of parts that propose drafts
        for j, part in enumerate(self.parts):
            if not part.needs.draws:
                self._ask(j, rows, sizes.tolist(), trees, whole)
        still: list[Draft] = []
        left = sizes.tolist()  # for the parts that draw
        for i, is_exact in enumerate(exact):
            budget = left[i] // 2 if is_exact else left[i]
            still.append(merge([trees[j][i] for j in trees], budget))
            if is_exact:
                left[i] -= len(still[i])
            elif rows[i].adaptive and is_sure(still[i], rows[i].depth):
                left[i] = 0
        drawing = [j for j, part in enumerate(self.parts) if part.needs.draws]
        for j in drawing:
            self._ask(j, rows, left, trees, whole)
        for i, is_exact in enumerate(exact) if drawing else ():
            late = [trees[j][i] for j in drawing]
            still[i] = _side_by_side([*late, still[i]]) if is_exact else merge([still[i], *late], int(sizes[i]))
        levels = next((drafts.levels for drafts in whole.values() if drafts.levels is not None), None)
        for i, view in enumerate(rows) if whole else ():
            self._last[view.row] = {j: drafts.row(i) for j, drafts in whole.items()}
        drafts = replace(Drafts.of(still, self._names), levels=levels)
        drawn = next((whole[j] for j in drawing if whole[j].q is not None), None)
        return drafts if drawn is None or not any(exact) else replace(drafts, q=_distributions(drafts, exact, drawn))

    def _ask(
        self,
        j: int,
        rows: Sequence[RowView],
        sizes: list[int],
        trees: dict[int, list[Draft]],
        whole: dict[int, Drafts],
    ) -> None:
        """What part j proposes for the rows that it is asked for."""
        part, at = self.parts[j], [i for i, size in enumerate(sizes) if size]
        if self._fallback[j]:
            at = [i for i in at if not any(trees[earlier][i] for earlier in range(j))]
        asked, asked_sizes = [rows[i] for i in at], [sizes[i] for i in at]
        trees[j] = [Draft() for _ in rows]
        if isinstance(part, TreeDrafter):
            for i, tree in zip(at, part.trees(asked, asked_sizes) if at else (), strict=True):
                tree.sources = [j] * len(tree)
                trees[j][i] = tree
            return
        proposed = Drafts.empty(len(rows))
        if not at and part.cost.levels is not None:
            proposed = replace(proposed, levels=np.zeros(len(rows), np.int32))
        elif at:
            proposed = part.propose(asked, np.array(asked_sizes, np.int32)).among(at, len(rows))
        whole[j] = proposed
        for i in at:
            trees[j][i] = proposed.row(i)
            trees[j][i].sources = [j] * len(trees[j][i])

    @property
    def observes(self) -> bool:
        return bool(self._last) or any(part.observes for part in self.parts)

    def observe(self, events: Sequence[Event]) -> None:
        for j, part in enumerate(self.parts):
            if isinstance(part, TreeDrafter):
                part.observe(events)
                continue
            part.observe([self._seen_by(j, self._columns[j], event) for event in events])
        for event in events:
            if event.verdict is not None:
                self._last.pop(event.row, None)

    def _seen_by(self, j: int, columns: list[int], event: Event) -> Event:
        """The event as part j would have it alone: its own layers, and the nodes of its own proposal.

        ``verdict`` is what the step would have been with this part's proposal only, so it may be shorter than
        ``tokens``.
        """
        states = None if event.hidden_states is None or not columns else event.hidden_states.layers(columns)
        verdict = event.verdict
        if verdict is not None:
            drafts = self._last.get(event.row)
            path = follow(drafts[j], verdict.tokens[:-1]) if drafts else np.zeros(0, np.int32)
            verdict = Verdict(verdict.tokens[: len(path) + 1], path)
        return event._replace(hidden_states=states, verdict=verdict)

    def rank(self, row: int, tokens: I32, ids: I32) -> None:
        for part in self.parts:
            if part.needs.ranks:
                part.rank(row, tokens, np.ascontiguousarray(ids[:, : part.needs.ranks]))

    def fork(self, src: int, dst: int, n: int) -> None:
        for part in self.parts:
            part.fork(src, dst, n)

    def release(self, row: int, tokens: I32 | None = None) -> None:
        self._last.pop(row, None)
        with ExitStack() as all_of_them:  # one that fails spares the others
            for part in self.parts:
                all_of_them.callback(part.release, row, tokens)

    def retire(self, row: int, tokens: I32 | None = None) -> None:
        self._last.pop(row, None)
        with ExitStack() as all_of_them:
            for part in self.parts:
                all_of_them.callback(part.retire, row, tokens)

    def growth(self, row: int, positions: int) -> int:
        return sum(part.growth(row, positions) for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def check(self, rows: Sequence[int]) -> None:
        assert set(self._last) <= set(rows), f"rows {set(self._last) - set(rows)} were never released"
        for part in self.parts:
            part.check(rows)

    def close(self) -> None:
        self.native = None
        with ExitStack() as all_of_them:
            for part in self.parts:
                all_of_them.callback(part.close)


def follow(draft: Draft, tokens: I32) -> I32:
    """The nodes int32 [n] of the draft's path along ``tokens`` int32 [m], as far as it goes."""
    path: list[int] = []
    for token in tokens.tolist():
        node = next((n for n in draft.children(path[-1] if path else -1) if draft.tokens[n] == token), None)
        if node is None:
            break
        path.append(node)
    return np.array(path, np.int32)


def is_sure(draft: Draft, levels: int | None) -> bool:
    """Whether a draft's drafter is so sure of it that a network's ``levels`` forwards are not worth their time.

    None: the network does not pay by the level, and is always asked.
    """
    deep = min(levels or 0, DEEP)
    return deep > 0 and any(gain >= SURE and len(draft.path(n)) >= deep for n, gain in enumerate(draft.gains))


def _side_by_side(trees: Sequence[Draft]) -> Draft:
    """All nodes of all trees, one tree after the other, nothing merged."""
    joined = Draft()
    for tree in trees:
        offset = len(joined)
        for token, parent, gain, source in zip(tree.tokens, tree.parents, tree.gains, tree.sources, strict=True):
            joined.add(token, parent + offset if parent >= 0 else -1, gain, source)
    return joined


def _distributions(drafts: Drafts, exact: list[bool], own: Drafts) -> F64:
    """q float64 [B, W, V]: what each node of ``own`` was drawn from, one-hot for the others. In exact rows drawn nodes
    come first, in their own order."""
    assert own.q is not None
    q = np.zeros((*drafts.tokens.shape, own.q.shape[2]))
    for i, is_exact in enumerate(exact):
        n = int(own.widths[i]) if is_exact else 0
        q[i, :n] = own.q[i, :n]
        rest = np.arange(n, int(drafts.widths[i]))
        q[i, rest, drafts.tokens[i, rest]] = 1.0
    return q
