"""How many prompt tokens a step may take beside rows that decode, so that they wait no longer than they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LEAST = 16  # prompt tokens a step: less would cost more than it gains
_WEIGHT = 0.2  # of the newest measurement, where it says that things go faster than thought


class Pace:
    """``most``: tokens a step; ``seconds``: that a prefill may add to a step in which rows decode (None: any).

    What a token costs is measured: what steps with chunks take beyond those without, over their tokens. A cost that
    rises is believed at once, one that falls slowly.
    """

    def __init__(self, most: int, seconds: float | None) -> None:
        self._most, self._seconds = most, seconds
        self.bounded = seconds is not None  # whether it learns
        self._plain = 0.0  # seconds of a step without chunks
        self._token: float | None = None  # seconds of a prompt's token

    def budget(self, decoding: bool) -> int:
        """Prompt tokens of the next step. ``decoding``: whether rows decode in it."""
        if not decoding or self._seconds is None:
            return self._most
        if self._token is None:
            return min(LEAST, self._most)
        fits = self._seconds / self._token if self._token > 0 else self._most
        return int(min(max(fits // LEAST * LEAST, LEAST), self._most))

    def learn(self, tokens: int, decoding: bool, seconds: float) -> None:
        """A step with so many prompt ``tokens`` took ``seconds``."""
        if not tokens:
            self._plain += _WEIGHT * (seconds - self._plain)
            return
        each = max(seconds - (self._plain if decoding else 0.0), 0.0) / tokens
        slower = self._token is None or each > self._token
        self._token = each if slower else (self._token or 0.0) + _WEIGHT * (each - (self._token or 0.0))


def shares(wanted: Sequence[tuple[str, int]], owners: int, budget: int) -> list[int]:
    """Tokens of a step for each row, at most ``budget`` together: its owner and what it ``wanted``, the oldest first.

    None of so many ``owners`` has more than an even share, whether or not others need theirs: those who decode beside a
    long prompt wait less.
    """
    counts, left = list[int](), Counter(dict.fromkeys((owner for owner, _ in wanted), max(budget // owners, 1)))
    for owner, tokens in wanted:
        count = min(tokens, left[owner], budget)
        counts.append(count)
        left[owner] -= count
        budget -= count
    return counts
