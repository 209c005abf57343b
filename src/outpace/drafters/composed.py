"""``a+b+c``: what several drafters propose, as one tree under one budget, the likeliest paths first.

Which part is asked for which rows, and the merge, are C++ (native/drafting/composed.h), as are native parts; what a
part in Python proposes is put into its slot. Under ``rejection`` a sampled proposal is a trial of its own: it may
neither be merged with an equal token nor dropped once it is drawn. So the deterministic parts are merged first, into
half of the budget; what they leave, known before anything is drawn, goes to the part that draws, and both stand side by
side, the drawn one tried first (multi-candidate rejection, SpecInfer, arXiv 2305.09781, algorithm 2, with each node's
own q).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from outpace import _fast
from outpace.common.arrays import F64, I32
from outpace.drafters.base import (
    DraftCost,
    Drafter,
    DrafterNeeds,
    Event,
    RowView,
    TreeDrafter,
    draws_now,
)
from outpace.errors import Argument, DrafterError, MemoryLimitError
from outpace.exact.drafts import Draft, Drafts, Verdict
from outpace.models.native.output import describe, known_edits
from outpace.params import Acceptance


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
        self.names = tuple(part.name for part in parts)
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
            reads=any(part.cost.reads for part in parts),
        )
        each = [
            (part.native, fallback, part.needs.draws, part.cost.levels is not None)
            for part, fallback in zip(parts, self._fallback, strict=True)
        ]
        self.native = self._native = _fast.native.ComposedDrafter(each)
        # By row and part: what was proposed in this step by parts in Python that learn what became of it.
        self._last: dict[int, dict[int, Draft]] = {}

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

    @property
    def in_python(self) -> Sequence[Drafter]:
        return [each for part in self.parts for each in part.in_python]

    def drafts_natively(self, view: RowView) -> bool:
        return all(part.drafts_natively(view) for part in self.parts)

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        drawn = [self.needs.draws and draws_now(view) for view in rows]
        slots = _fast.native.Slots(
            self._native, [_asked(*row) for row in zip(rows, sizes.tolist(), drawn, strict=True)]
        )
        q: dict[int, F64] = {}  # by row: [k, V] of the nodes that its part that draws proposed
        for view in rows:
            self._last.pop(view.row, None)
        for j in self._native.order:
            part = self.parts[j]
            wanted = slots.wanted(j)
            at, left = [i for i, *_ in wanted], [size for _, size, *_ in wanted]
            native = [k for k, i in enumerate(at) if part.drafts_natively(rows[i])]
            if native:
                slots.ask(native)
            which = [k for k in range(len(at)) if k not in native]
            if not which:
                continue
            # A composition in this one has other sources than the policy's step.
            views, most = [rows[at[k]]._replace(in_step=None) for k in which], [left[k] for k in which]
            if part.cost.levels is not None:
                views = [
                    view._replace(depth=None if levels < 0 else levels, floor=floor)
                    for view, (_, _, levels, floor) in zip(views, (wanted[k] for k in which), strict=True)
                ]
            try:
                if isinstance(part, TreeDrafter):
                    slots.put(which, [_lists(tree) for tree in part.trees(views, most)], None)
                    continue
                drafts = part.propose(views, np.array(most, np.int32))
            except MemoryLimitError:  # nothing this time
                continue
            proposed = [drafts.row(n) for n in range(len(views))]
            slots.put(
                which, [_lists(draft) for draft in proposed], None if drafts.levels is None else drafts.levels.tolist()
            )
            for k, view, draft in zip(which, views, proposed, strict=True):
                if draft.q is not None and drawn[at[k]]:
                    q[at[k]] = draft.q
                if part.observes:
                    self._last.setdefault(view.row, {})[j] = draft
        trees, levels = slots.merged()
        found = Drafts.of([Draft(*lists) for lists in trees], self.names)
        if self.cost.levels is not None:
            found = replace(found, levels=np.array(levels, np.int32))
        if not q:
            return found
        distributions = found.one_hot(next(iter(q.values())).shape[1])
        for i, own in q.items():
            distributions[i, : len(own)] = own  # drawn nodes come first, in their own order
        return replace(found, q=distributions)

    def observe(self, events: Sequence[Event]) -> None:
        for j, part in enumerate(self.parts):
            if part.observes:
                part.observe(events if isinstance(part, TreeDrafter) else [self._seen_by(j, e) for e in events])
        for event in events:
            if event.verdict is not None:
                self._last.pop(event.row, None)

    def _seen_by(self, j: int, event: Event) -> Event:
        """The event as part j would have it alone: its own layers, and the nodes of its own proposal.

        ``verdict`` is what the step would have been with this part's proposal only, so it may be shorter than
        ``tokens``.
        """
        columns, states, verdict = self._columns[j], event.hidden_states, event.verdict
        states = None if states is None or not columns else states.layers(columns)
        if verdict is not None:
            draft = self._last.get(event.row, {}).get(j)
            path = np.zeros(0, np.int32) if draft is None else follow(draft, verdict.tokens[:-1])
            verdict = Verdict(verdict.tokens[: len(path) + 1], path)
        return event._replace(hidden_states=states, verdict=verdict)

    def read_prompts(self, rows: Sequence[tuple[int, I32, int, int]]) -> Mapping[int, tuple[int, int]]:
        read = [part.read_prompts(rows) for part in self.parts if part.cost.reads]
        return (
            {row: min(its[row] for its in read) for row in read[0] if all(row in its for its in read)} if read else {}
        )

    def rank(self, row: int, tokens: I32, ids: I32) -> None:
        for part in self.parts:
            if 0 < part.needs.ranks <= ids.shape[1]:  # fewer where parts that need more get them in C++
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


def _lists(draft: Draft) -> tuple[list[int], list[int], list[float], list[int]]:
    return draft.tokens, draft.parents, draft.gains, draft.sources


def _asked(view: RowView, size: int, drawn: bool) -> tuple[Any, ...]:
    """A row as ``_native.Slots`` takes it."""
    # Under rejection no drafter reads the noise that chooses.
    chooser = None if draws_now(view) else describe(view.chooser, known_edits(view.chooser) or [])
    depth = -1 if view.depth is None else view.depth
    prompt = len(view.tokens) - view.chooser.index
    known = view.row, view.request, prompt, view.tokens, size, depth, view.floor, view.adaptive
    return *known, drawn, view.start, chooser, view.in_step
