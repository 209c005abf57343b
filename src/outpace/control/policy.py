"""The seam for policies: how much every row drafts in a step. Nothing here can change a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outpace.drafters.base import RowView
from outpace.exact.drafts import Drafts, Verdicts


class Load(NamedTuple):
    """What else is in the step: cached positions of each row, and tokens of prefill chunks."""

    contexts: Sequence[int]
    prefill: int = 0


class Decision(NamedTuple):
    """What was decided for a row in a step, and why: the speed expected of the best draft over plain decoding."""

    size: int
    expected: float | None  # None: nothing was proposed, or a fixed size left nothing to decide

    def __str__(self) -> str:
        if self.expected is None:
            return f"fixed size {self.size}" if self.size else "off: nothing was proposed"
        return f"{'on' if self.size else 'off'}: expected {self.expected:.2f}x"


PLAIN = Decision(0, None)  # nothing was proposed


class Policy(Protocol):
    """Chooses each row's draft: ``plan`` before drafting, ``trim`` after, ``learn`` after the verdicts."""

    def plan(self, rows: Sequence[RowView], most: list[int], load: Load) -> tuple[list[int], list[int]]:
        """Nodes to ask for and drafting forwards to allow, [B] each, at most ``most`` [B]; 0 is plain decoding."""

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        """The part of ``drafts`` that is worth verifying. Keeps parents of what it keeps."""

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> Sequence[Decision]:
        """What became of the step, with its wall time by phase; what was decided for each row."""

    def release(self, row: int) -> None:
        """The row is gone; keep nothing of it but shared averages."""


class Fixed:
    """Drafts what was asked for."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def plan(self, rows: Sequence[RowView], most: list[int], load: Load) -> tuple[list[int], list[int]]:
        return most, most

    def trim(self, rows: Sequence[RowView], drafts: Drafts, load: Load) -> Drafts:
        self._widths = drafts.widths.tolist()
        return drafts

    def learn(self, verdicts: Verdicts, seconds: dict[str, float]) -> Sequence[Decision]:
        return [Decision(width, None) for width in self._widths]

    def release(self, row: int) -> None:
        """Nothing is kept."""
