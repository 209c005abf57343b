"""The seam for policies: how much every row drafts in a step. Nothing here can change a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdicts


class Load(NamedTuple):
    """What else is in the step: cached positions of each row [B], and tokens of prefill chunks."""

    contexts: Sequence[int]
    prefill: int = 0


class Sizes(NamedTuple):
    """Nodes to ask for and drafting forwards to allow, [B] each; 0 is plain decoding."""

    nodes: list[int]
    levels: list[int]


class Decision(NamedTuple):
    """What was decided for a row in a step, and why: the speed expected of the best draft over plain decoding."""

    size: int
    expected: float | None  # None: no draft was there to judge, or its size was fixed
    why: str = ""  # in words; with numbers where the policy was told to explain
    worth: tuple[float, ...] = ()  # the chance of each proposed node's whole path, where the policy was told to explain

    def __str__(self) -> str:
        if self.expected is None:
            return f"fixed size {self.size}" if self.size else f"off: {self.why or 'no draft was there'}"
        return f"{'on' if self.size else 'off'}: expected {self.expected:.2f}x"


PLAIN = Decision(0, None)  # no draft was there


EVERYTHING = "everything"  # the ``Policy.native`` that drafts and verifies all that a row may have


class Policy(Protocol):
    """Chooses each row's draft: ``plan`` before drafting, ``trim`` after, ``learn`` after the verdicts.

    ``rows``: the step's B rows; ``drafts`` and ``verdicts``: theirs; ``load``: what else is in the step.
    Called once a step in this order, for the same rows; a step that fails in between is simply planned again. Rows
    whose drafter is "none" are in ``rows`` with ``most`` 0.
    """

    @property
    def native(self) -> Any:
        """The same policy in C++ (an ``outpace._native.Policy``, or ``EVERYTHING``), which plans, trims and learns in
        its place; None: there is none."""

    def plan(self, rows: Sequence[RowView], most: Sequence[int], load: Load) -> Sizes:
        """At most ``most`` [B] nodes each."""

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> tuple[Drafts, Sequence[Decision]]:
        """The part of ``drafts`` that is worth verifying, with parents of what it keeps, and each row's decision."""

    def learn(self, rows: Sequence[RowView], drafts: Drafts, verdicts: Verdicts, seconds: Mapping[str, float]) -> None:
        """What became of the step: ``drafts`` as verified; ``seconds``: wall time by phase (draft, target, verify,
        other). Rows that were released since ``plan`` are over: nothing may be kept of them."""

    def release(self, row: int) -> None:
        """``row`` is gone; keep nothing of it but shared averages."""


class Fixed:
    """Drafts what was asked for."""

    native: Any = EVERYTHING

    def plan(self, rows: Sequence[RowView], most: Sequence[int], load: Load) -> Sizes:
        return Sizes(list(most), list(most))

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> tuple[Drafts, Sequence[Decision]]:
        return drafts, [Decision(width, None) for width in drafts.widths.tolist()]

    def learn(self, rows: Sequence[RowView], drafts: Drafts, verdicts: Verdicts, seconds: Mapping[str, float]) -> None:
        """Nothing to learn."""

    def release(self, row: int) -> None:
        """Nothing is kept."""
