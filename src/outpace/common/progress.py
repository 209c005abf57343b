"""How far something is that takes a while: a bar for whoever watches, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_WIDTH = 30  # of the bar
_EVERY = 0.1  # seconds between two drawings


def in_notebook() -> bool:
    """Whether this process runs a notebook's cells."""
    return "ipykernel" in sys.modules


class Advance(Protocol):
    def __call__(self, n: int, tokens: int = 0, /) -> None:
        """``n`` more of the total are done; ``tokens`` count for the speed that is shown."""


@contextmanager
def progress(what: str, total: int, *, speed: bool = False, shown: bool | None = None) -> Iterator[Advance]:
    """A bar on standard error until the block ends: the share that is done, and the time left.

    ``speed``: tokens a second, too. ``shown``: None for where a person watches, on a terminal or in a notebook.
    """
    shown = sys.stderr.isatty() or in_notebook() if shown is None else shown
    begun, drawn = time.monotonic(), -_EVERY
    done = tokens = 0

    def advance(n: int, more: int = 0, /) -> None:
        nonlocal done, tokens, drawn
        done, tokens, now = done + n, tokens + more, time.monotonic()
        if not shown or now - drawn < _EVERY:
            return
        drawn, share = now, min(done / max(total, 1), 1.0)
        left = f"  {(now - begun) * (1 - share) / share:,.0f} s left" if share else ""
        bar = ("#" * round(_WIDTH * share)).ljust(_WIDTH, "-")
        rate = f"  {tokens / (now - begun):,.0f} tokens/s" if speed and tokens else ""
        print(f"\r{what} {bar} {share:4.0%}{left}{rate}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
