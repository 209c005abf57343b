"""Drafters and the policy behind a wall: whatever they raise, their rows go on plainly and nothing else notices.

A drafter that fails loses the rows that it served; new requests may try it again. A policy that fails is replaced by a
fresh one. Only KeyboardInterrupt and its like pass through, and leave a state that the next step can go on from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from outpace.control.adaptive import Adaptive
from outpace.control.policy import PLAIN, Decision, Load, Policy, Sizes
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, Event, RowView
from outpace.engine.ruled import under_rules
from outpace.errors import MemoryLimitError, RuleError
from outpace.exact.drafts import Draft, Drafts, check_drafts

if TYPE_CHECKING:
    from outpace.arrays import I32
    from outpace.engine.sequence import Sequence

NONE = "none"
PLAINLY = DraftCost()
NOTHING = DrafterNeeds()
Teach = Callable[[Policy, Mapping[str, float]], None]


class Proposal(NamedTuple):
    """What was drafted for the B rows of a step: before and after the policy, and why."""

    views: SequenceOf[RowView]
    proposed: Drafts
    kept: Drafts
    decisions: SequenceOf[Decision]
    planned: bool  # whether the policy was asked, and has to hear what became of it


class Drafting:
    """``drafters`` by name; ``policy``: makes the policy. ``vocab``: token ids that a draft may have."""

    def __init__(self, drafters: Mapping[str, Drafter], policy: Callable[[], Policy], vocab: int) -> None:
        self._drafters, self._make_policy, self._vocab = dict(drafters), policy, vocab
        self._policy = policy()
        self._explains = False
        # Whether some drafter has KV of its own, which grows with its rows.
        self.keeps_cache = any(type(drafter).growth is not Drafter.growth for drafter in drafters.values())
        self._retired: dict[int, str] = {}  # rows of which KV alone is left, and whose drafter keeps its part of it
        self._unreleased: dict[tuple[str, int], I32 | None] = {}  # rows whose release failed: tried again
        self._asked: dict[int, Draft] = {}  # of this step, by row, where a drafter reads choices: as it was proposed,
        self._verified: dict[int, Draft] = {}  # and as it was verified
        self.faults: list[str] = []  # of this step
        self.needs = DrafterNeeds(
            taps=tuple(sorted({layer for d in drafters.values() for layer in d.needs.taps})),
            choices=any(d.needs.choices for d in drafters.values()),
            draws=any(d.needs.draws for d in drafters.values()),
        )

    @property
    def policy(self) -> Policy:
        return self._policy

    def explain(self, on: bool) -> None:
        """Whether decisions say what each node was expected to be worth, and why: for whoever watches steps."""
        self._explains = on
        if isinstance(self._policy, Adaptive):
            self._policy.explain = on

    def drafter_of(self, sequence: Sequence) -> Drafter | None:
        """The one that serves the row; None: it decodes plainly."""
        return self._drafters[sequence.drafter] if self.drafts_for(sequence) else None

    def needs_of(self, sequence: Sequence) -> DrafterNeeds:
        """What the drafter of a row needs; nothing where it decodes plainly."""
        return self._drafters[sequence.drafter].needs if self.drafts_for(sequence) else NOTHING

    def drafts_for(self, sequence: Sequence) -> bool:
        """Whether some drafter serves the row."""
        return sequence.size > 0 and sequence.drafter in self._drafters

    def listens_to(self, sequence: Sequence) -> bool:
        """Whether the row's drafter wants to hear what becomes final in it."""
        return self.drafts_for(sequence) and self._drafters[sequence.drafter].listens

    # -- the step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new step: what went wrong in the last one is told, rows that were not released are."""
        self.faults = []
        for (name, row), tokens in list(self._unreleased.items()):
            self._release(name, row, tokens)

    def propose(self, sequences: SequenceOf[Sequence], load_of: Callable[[], Load]) -> Proposal:
        """Drafts for the decoding rows. Never raises an Exception; those whose drafter failed have none."""
        b = len(sequences)
        if not any(self.drafts_for(s) for s in sequences):
            return _nothing(b)
        load = load_of()
        views = [self._view(s) for s in sequences]
        sizes = self._plan(sequences, views, load)
        groups: dict[str, list[int]] = {}
        for i, (view, size) in enumerate(zip(views, sizes.nodes, strict=True)):
            if size and sequences[i].size:
                groups.setdefault(view.drafter, []).append(i)
        parts = []
        for name, where in groups.items():
            drafts = self._ask(name, [sequences[i] for i in where], [views[i] for i in where], sizes, where)
            if drafts is not None:
                parts.append((where, drafts))
        proposed = Drafts.join(parts, b) if parts else Drafts.empty(b)
        if self.needs.choices:
            self._asked = {view.row: proposed.row(i) for i, view in enumerate(views)}
        if any(view.chooser.rules for view in views):
            proposed = under_rules(views, _most(sequences, views), proposed)
        kept, decisions = self._trim(sequences, views, proposed, load)
        if self.needs.choices:
            self._verified = {view.row: kept.row(i) for i, view in enumerate(views)}
        return Proposal(views, proposed, kept, decisions, True)

    def _view(self, sequence: Sequence) -> RowView:
        request, drafts = sequence.request, self.drafts_for(sequence)
        drafter = sequence.drafter if drafts else NONE
        return RowView(
            sequence.row, request.id, sequence.tokens, sequence.limit, sequence.chooser, request.acceptance,
            adaptive=request.adaptive and drafts, drafter=drafter,
            cost=self._drafters[drafter].cost if drafts else PLAINLY,
        )  # fmt: skip

    def _plan(self, sequences: SequenceOf[Sequence], views: SequenceOf[RowView], load: Load) -> Sizes:
        most = _most(sequences, views)
        try:
            sizes = self._policy.plan(views, most, load)
            if not all(0 <= n <= m for n, m in zip(sizes.nodes, most, strict=True)):
                raise ValueError(f"it asks for {sizes.nodes} nodes where {most} are allowed")
            return sizes
        except Exception as error:
            self._policy_failed(error, sequences)
            nodes = [0 if s.request.adaptive else n for s, n in zip(sequences, most, strict=True)]
            return Sizes(nodes, nodes)

    def _ask(
        self, name: str, rows: SequenceOf[Sequence], views: list[RowView], sizes: Sizes, where: list[int]
    ) -> Drafts | None:
        drafter = self._drafters[name]
        asked = [sizes.nodes[i] for i in where]
        if drafter.cost.levels is not None:
            views = [view._replace(depth=sizes.levels[i]) for view, i in zip(views, where, strict=True)]
        try:
            drafts = drafter.propose(views, np.array(asked, np.int32))
            check_drafts(drafts, asked, self._vocab)
            return drafts
        except (MemoryLimitError, RuleError):
            return None  # no room for its cache, or a request's own fault, which verification meets: nothing this time
        except Exception as error:
            self._drafter_failed(name, error, rows)
            return None

    def _trim(
        self, sequences: SequenceOf[Sequence], views: SequenceOf[RowView], proposed: Drafts, load: Load
    ) -> tuple[Drafts, SequenceOf[Decision]]:
        try:
            kept, decisions = self._policy.trim(views, proposed, load)
            if len(decisions) != len(views) or (kept is not proposed and (kept.widths > proposed.widths).any()):
                raise ValueError("it kept more than was proposed")
            return kept, decisions
        except Exception as error:
            self._policy_failed(error, sequences)
            return Drafts.empty(len(views)), [PLAIN] * len(views)

    def observe(self, events: SequenceOf[tuple[Sequence, Event]]) -> None:
        """What became final in rows that go on."""
        by_drafter: dict[str, list[tuple[Sequence, Event]]] = {}
        for sequence, event in events:
            if self.drafts_for(sequence):
                by_drafter.setdefault(sequence.drafter, []).append((sequence, event))
        for name, its in by_drafter.items():
            drafter = self._drafters[name]
            seen = [event for _, event in its]
            if drafter.needs.taps != self.needs.taps:
                columns = [self.needs.taps.index(layer) for layer in drafter.needs.taps]
                seen = [
                    e._replace(taps=e.taps.layers(columns) if e.taps is not None and columns else None) for e in seen
                ]
            if drafter.needs.choices:
                seen = [self._its_choices(e) for e in seen]
            try:
                drafter.observe(seen)
            except Exception as error:
                self._drafter_failed(name, error, [sequence for sequence, _ in its])

    def hear(
        self, going: SequenceOf[tuple[int, int, Sequence]], observe: Callable[[list[tuple[int, int]]], None]
    ) -> None:
        """As ``observe``, where C++ has what became final: (row of the step, how many tokens, its sequence) of rows
        that go on."""
        by_drafter: dict[str, list[tuple[int, int, Sequence]]] = {}
        for row in going:
            if self.needs_of(row[2]).taps:
                by_drafter.setdefault(row[2].drafter, []).append(row)
        for name, its in by_drafter.items():
            try:
                observe([(i, tokens) for i, tokens, _ in its])
            except Exception as error:
                self._drafter_failed(name, error, [sequence for _, _, sequence in its])

    def _its_choices(self, event: Event) -> Event:
        """The event with choices numbered as the drafter proposed its nodes; -1 where a node was not verified."""
        own, kept = self._asked.get(event.row), self._verified.get(event.row)
        if event.choices is None or own is None or kept is None:
            return event._replace(choices=None)
        numbers = {(kept.parent(n), int(token)): n for n, token in enumerate(kept.tokens)}
        place = {-1: -1}
        for node, token in enumerate(own.tokens.tolist()):
            found = numbers.get((place[own.parent(node)], token)) if own.parent(node) in place else None
            if found is not None:
                place[node] = found
        said = [int(event.choices[place[node] + 1]) if node in place else -1 for node in range(-1, len(own))]
        return event._replace(choices=np.array(said, np.int32))

    def learn(self, sequences: SequenceOf[Sequence], teach: Teach, seconds: Mapping[str, float]) -> None:
        """``teach``: tells the policy what became of the step, which took so many seconds by phase."""
        try:
            teach(self._policy, seconds)
        except Exception as error:
            self._policy_failed(error, sequences)

    # -- rows --------------------------------------------------------------------------------------------------------

    def fork(self, src: int, source: Sequence | None, sequence: Sequence, n: int) -> None:
        """A row begins with the first n tokens of the row ``src``, in which ``source`` runs; None: it is retired."""
        if self.knows(src, source, sequence):
            try:
                self._drafters[sequence.drafter].fork(src, sequence.row, n)
            except MemoryLimitError:
                return  # it catches up by itself, once there is room
            except Exception as error:
                self._drafter_failed(sequence.drafter, error, [sequence])

    def knows(self, src: int, source: Sequence | None, sequence: Sequence) -> bool:
        """Whether the drafter of ``sequence`` served the row ``src``, which runs or is retired."""
        name = self._retired.get(src) if source is None else source.drafter
        return self.drafts_for(sequence) and sequence.drafter == name

    def reads_from(self, src: int, source: Sequence | None, sequence: Sequence) -> bool:
        """Whether the drafter of ``sequence`` reads taps, each with the token after it, and has those of the row
        ``src``."""
        return bool(self.needs_of(sequence).taps) and self.knows(src, source, sequence)

    def release(self, sequence: Sequence, *, kept: bool = False) -> None:
        """The sequence's row is gone (call this while it still has its number), or its KV alone is ``kept``."""
        whole = sequence.finish_reason in ("stop", "length")
        tokens = sequence.tokens.copy() if whole else None
        name, row = sequence.drafter, sequence.row
        if name in self._drafters:
            if kept and self._drafters[name].retires and sequence.size:
                self._retire(name, row, tokens)
            else:
                self._release(name, row, tokens)
        try:
            self._policy.release(row)
        except Exception as error:
            self._policy_failed(error, ())

    def _retire(self, name: str, row: int, tokens: I32 | None) -> None:
        self._retired[row] = name
        try:
            self._drafters[name].retire(row, tokens)
        except Exception as error:
            self._say(f"the drafter {name} failed to keep a row ({_brief(error)})")
            self.forget(row)

    def forget(self, row: int) -> None:
        """The KV of a row that was kept is gone."""
        if (name := self._retired.pop(row, None)) is not None:
            self._release(name, row, None)

    def give_up(self, sequence: Sequence, why: str) -> None:
        """The row goes on plainly, and its drafter gives back what it holds for it."""
        sequence.plainly(why)
        self._release(sequence.drafter, sequence.row, None)

    def growth(self, sequence: Sequence, positions: int) -> int:
        """KV bytes more that drafting for a row takes once it has so many positions."""
        if not self.drafts_for(sequence):
            return 0
        try:
            return self._drafters[sequence.drafter].growth(sequence.row, positions)
        except Exception as error:
            self._drafter_failed(sequence.drafter, error, [sequence])
            return 0

    def most_growth(self, sequences: SequenceOf[Sequence]) -> float:
        """At most what ``growth`` comes to for all rows, ``sequence.size`` positions on: one question a drafter."""
        if not self.keeps_cache:
            return 0
        asked: dict[str, tuple[int, int]] = {}
        for sequence in sequences:
            if self.drafts_for(sequence):
                rows, positions = asked.get(sequence.drafter, (0, 0))
                asked[sequence.drafter] = rows + 1, max(positions, sequence.length + sequence.size)
        try:
            return sum(rows * self._drafters[name].growth(-1, most) for name, (rows, most) in asked.items())
        except Exception:
            return math.inf  # `growth` finds out whose fault it is

    @property
    def bytes(self) -> int:
        """KV bytes that drafters use now."""
        return sum(drafter.bytes for drafter in self._drafters.values())

    def _release(self, name: str, row: int, tokens: I32 | None) -> None:
        self._unreleased[name, row] = tokens
        for last in (False, True):  # once more: a row that stays behind would be another request's
            try:
                self._drafters[name].release(row, tokens)
            except Exception as error:
                self._say(f"the drafter {name} failed to release a row ({_brief(error)})")
                if last:
                    return
            else:
                break
        del self._unreleased[name, row]

    def check(self, rows: SequenceOf[int]) -> None:
        """Assert that drafters hold nothing but rows that are alive or retired, or whose release is still to be tried
        again."""
        for name, drafter in self._drafters.items():
            unreleased = [row for its, row in self._unreleased if its == name]
            drafter.check([*rows, *unreleased, *(row for row, its in self._retired.items() if its == name)])

    # -- faults ------------------------------------------------------------------------------------------------------

    def _drafter_failed(self, name: str, error: Exception, rows: SequenceOf[Sequence]) -> None:
        self._say(f"the drafter {name} failed ({_brief(error)})")
        for sequence in rows:
            self.give_up(
                sequence, f"the drafter {name} failed ({_brief(error)}), so it was decoded plainly from there on"
            )

    def _policy_failed(self, error: Exception, rows: SequenceOf[Sequence]) -> None:
        self._say(f"the policy failed ({_brief(error)})")
        for sequence in rows:
            if sequence.request.adaptive and sequence.size:
                self.give_up(sequence, f"the policy failed ({_brief(error)}), so it was decoded plainly from there on")
        self._policy = self._make_policy()
        self.explain(self._explains)

    def _say(self, fault: str) -> None:
        self.faults.append(fault)


def _most(sequences: SequenceOf[Sequence], views: SequenceOf[RowView]) -> list[int]:
    """Nodes that each row may have."""
    return [
        min(s.size, s.room - 1) if view.drafter != NONE and not s.paused else 0
        for s, view in zip(sequences, views, strict=True)
    ]


@lru_cache(maxsize=64)
def _nothing(rows: int) -> Proposal:
    """What is proposed where nobody drafts."""
    drafts = Drafts.empty(rows)
    return Proposal((), drafts, drafts, (PLAIN,) * rows, False)


def _brief(error: Exception) -> str:
    said = str(error).splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
