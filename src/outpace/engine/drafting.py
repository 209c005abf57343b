"""Drafters behind a wall: whatever they raise, their rows go on plainly and nothing else notices.

A drafter that fails loses the rows that it served; new requests may try it again. Only KeyboardInterrupt and its like
pass through, and leave a state that the next step can go on from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any, TypeVar

from outpace.control.adaptive import Adaptive
from outpace.drafters.base import DraftCost, Drafter, DrafterNeeds, Event, RowView
from outpace.errors import MemoryLimitError

if TYPE_CHECKING:
    from outpace.common.arrays import I32
    from outpace.engine.sequence import Sequence

NONE = "none"
_Found = TypeVar("_Found")
PLAINLY = DraftCost()
NOTHING = DrafterNeeds()


class Drafting:
    """``drafters`` by name; ``policy``: sizes the drafts of rows whose request leaves it to the engine (None: none)."""

    def __init__(self, drafters: Mapping[str, Drafter], policy: Adaptive | None = None) -> None:
        self.drafters, self.policy = dict(drafters), policy
        # Whether some drafter has KV of its own, which grows with its rows.
        self.keeps_cache = any(type(drafter).growth is not Drafter.growth for drafter in drafters.values())
        self._retired: dict[int, str] = {}  # rows of which KV alone is left, and whose drafter keeps its part of it
        self._unreleased: dict[tuple[str, int], I32 | None] = {}  # rows whose release failed: tried again
        self.faults: list[str] = []  # of this step
        self.needs = DrafterNeeds(
            hidden_layers=tuple(sorted({layer for d in drafters.values() for layer in d.needs.hidden_layers})),
            choices=any(d.needs.choices for d in drafters.values()),
            draws=any(d.needs.draws for d in drafters.values()),
        )

    def explain(self, on: bool) -> None:
        """Whether decisions say what each node was expected to be worth, and why: for whoever watches steps."""
        if self.policy is not None:
            self.policy.explain = on

    def drafter_of(self, sequence: Sequence) -> Drafter | None:
        """The one that serves the row; None: it decodes plainly."""
        return self.drafters[sequence.drafter] if self.drafts_for(sequence) else None

    def needs_of(self, sequence: Sequence) -> DrafterNeeds:
        """What the drafter of a row needs; nothing where it decodes plainly."""
        return self.drafters[sequence.drafter].needs if self.drafts_for(sequence) else NOTHING

    def drafts_for(self, sequence: Sequence) -> bool:
        """Whether some drafter serves the row."""
        return sequence.size > 0 and sequence.drafter in self.drafters

    def reads_prompts(self, sequence: Sequence) -> bool:
        """Whether the row's drafter reads a prompt by forwards of its own."""
        return self.drafts_for(sequence) and self.drafters[sequence.drafter].cost.reads

    # -- the step ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new step: what went wrong in the last one is told, rows that were not released are."""
        self.faults = []
        for (name, row), tokens in list(self._unreleased.items()):
            self._release(name, row, tokens)

    def view(self, sequence: Sequence) -> RowView:
        """The row as drafters and the policy see it."""
        request, drafts = sequence.request, self.drafts_for(sequence)
        drafter = sequence.drafter if drafts else NONE
        return RowView(
            sequence.row, request.id, sequence.tokens, sequence.limit, sequence.chooser, request.acceptance,
            adaptive=request.adaptive and drafts, drafter=drafter,
            cost=self.drafters[drafter].cost if drafts else PLAINLY,
        )  # fmt: skip

    def observing(self, rows: SequenceOf[tuple[int, int, Sequence]]) -> dict[str, list[tuple[int, int, Sequence]]]:
        """Those of ``rows`` whose drafter observes what becomes final in them, by its name."""
        found: dict[str, list[tuple[int, int, Sequence]]] = {}
        for row in rows:
            sequence = row[2]
            if self.drafts_for(sequence) and (sequence.listens or sequence.observes):
                found.setdefault(sequence.drafter, []).append(row)
        return found

    def observe(self, name: str, rows: SequenceOf[Sequence], events: SequenceOf[Event]) -> None:
        """What became final in rows that go on."""
        needs = self.drafters[name].needs
        if needs.hidden_layers != self.needs.hidden_layers:
            columns = [self.needs.hidden_layers.index(layer) for layer in needs.hidden_layers]
            events = [
                e._replace(
                    hidden_states=e.hidden_states.layers(columns) if e.hidden_states is not None and columns else None
                )
                for e in events
            ]
        self.attempt(name, rows, self.drafters[name].observe, events)

    def attempt(
        self, name: str, rows: SequenceOf[Sequence], call: Callable[[Any], _Found], argument: Any
    ) -> _Found | None:
        """``call(argument)`` on behalf of a drafter, which loses its rows when that fails; then None."""
        try:
            return call(argument)
        except Exception as error:
            self.drafter_failed(name, error, rows)
            return None

    # -- rows --------------------------------------------------------------------------------------------------------

    def fork(self, src: int, source: Sequence | None, sequence: Sequence, n: int) -> None:
        """A row begins with the first n tokens of the row ``src``, in which ``source`` runs; None: it is retired."""
        if self.knows(src, source, sequence):
            try:
                self.drafters[sequence.drafter].fork(src, sequence.row, n)
            except MemoryLimitError:
                return  # it catches up by itself, once there is room
            except Exception as error:
                self.drafter_failed(sequence.drafter, error, [sequence])

    def knows(self, src: int, source: Sequence | None, sequence: Sequence) -> bool:
        """Whether the drafter of ``sequence`` served the row ``src``, which runs or is retired."""
        name = self._retired.get(src) if source is None else source.drafter
        return self.drafts_for(sequence) and sequence.drafter == name

    def reads_from(self, src: int, source: Sequence | None, sequence: Sequence) -> bool:
        """Whether the drafter of ``sequence`` reads hidden layers, each with the token after it, and has those of
        the row ``src``."""
        return bool(self.needs_of(sequence).hidden_layers) and self.knows(src, source, sequence)

    def release(self, sequence: Sequence, *, kept: bool = False) -> None:
        """The sequence's row is gone (call this while it still has its number), or its KV alone is ``kept``."""
        whole = sequence.finish_reason in ("stop", "length")
        tokens = sequence.tokens.copy() if whole else None
        name, row = sequence.drafter, sequence.row
        if name in self.drafters:
            if kept and self.drafters[name].retires and sequence.size:
                self._retire(name, row, tokens)
            else:
                self._release(name, row, tokens)
        if self.policy is not None:
            self.policy.release(row)

    def _retire(self, name: str, row: int, tokens: I32 | None) -> None:
        self._retired[row] = name
        try:
            self.drafters[name].retire(row, tokens)
        except Exception as error:
            self._say(f"the drafter {name} failed to keep a row ({_brief(error)})")
            self.forget(row)

    def forget(self, row: int) -> None:
        """The KV of a row that was kept is gone."""
        if (name := self._retired.pop(row, None)) is not None:
            self._release(name, row, None)

    def mend(self, gone: set[int], kept: SequenceOf[int]) -> None:
        """After an interruption anywhere: nothing of rows that are ``gone`` is held. ``kept``: the retired ones."""
        self._retired = {row: name for row, name in self._retired.items() if row in kept}
        for row in gone | (set(kept) - set(self._retired)):
            for name in self.drafters:
                self._release(name, row, None)
            if self.policy is not None:
                self.policy.release(row)

    def give_up(self, sequence: Sequence, why: str) -> None:
        """The row goes on plainly, and its drafter gives back what it holds for it."""
        sequence.plainly(why)
        self._release(sequence.drafter, sequence.row, None)

    def growth(self, sequence: Sequence, positions: int) -> int:
        """KV bytes more that drafting for a row takes once it has so many positions."""
        if not self.drafts_for(sequence):
            return 0
        try:
            return self.drafters[sequence.drafter].growth(sequence.row, positions)
        except Exception as error:
            self.drafter_failed(sequence.drafter, error, [sequence])
            return 0

    def most_growth(self, sequences: SequenceOf[Sequence], steps: int) -> float:
        """At most what ``growth`` comes to for all rows after so many steps: one question a drafter."""
        if not self.keeps_cache:
            return 0
        asked: dict[str, tuple[int, int]] = {}
        for sequence in sequences:
            if self.drafts_for(sequence):
                rows, positions = asked.get(sequence.drafter, (0, 0))
                asked[sequence.drafter] = rows + 1, max(positions, sequence.length + steps * (1 + sequence.size))
        try:
            return sum(rows * self.drafters[name].growth(-1, most) for name, (rows, most) in asked.items())
        except Exception:
            return math.inf  # `growth` finds out whose fault it is

    @property
    def bytes(self) -> int:
        """KV bytes that drafters use now."""
        return sum(drafter.bytes for drafter in self.drafters.values())

    def _release(self, name: str, row: int, tokens: I32 | None) -> None:
        self._unreleased[name, row] = tokens
        for last in (False, True):  # once more: a row that stays behind would be another request's
            try:
                self.drafters[name].release(row, tokens)
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
        for name, drafter in self.drafters.items():
            unreleased = [row for own, row in self._unreleased if own == name]
            drafter.check([*rows, *unreleased, *(row for row, own in self._retired.items() if own == name)])

    # -- faults ------------------------------------------------------------------------------------------------------

    def drafter_failed(self, name: str, error: Exception, rows: SequenceOf[Sequence]) -> None:
        self._say(f"the drafter {name} failed ({_brief(error)})")
        for sequence in rows:
            self.give_up(
                sequence, f"the drafter {name} failed ({_brief(error)}), so it was decoded plainly from there on"
            )

    def _say(self, fault: str) -> None:
        self.faults.append(fault)


def _brief(error: Exception) -> str:
    try:
        lines = str(error).splitlines()
    except Exception:  # of a drafter's own making
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
