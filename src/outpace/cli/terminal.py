"""What commands draw on a terminal: a bar for what takes a while, tables, colours. Elsewhere plain text."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

_WIDTH = 30  # of the bar
_EVERY = 0.1  # seconds between two drawings
_CODES = {"green": "32", "red": "1;31", "yellow": "1;33", "bold green": "1;32"}


class Advance(Protocol):
    def __call__(self, n: int, tokens: int = 0, /) -> None:
        """``n`` more of the total are done; ``tokens`` count for the speed that is shown."""


@contextmanager
def progress(what: str, total: int, *, speed: bool = False) -> Iterator[Advance]:
    """How far it is, in ``what``, and the time left; ``speed``: tokens a second, too. On a terminal, until it ends."""
    shown = sys.stderr.isatty()
    begun = drawn = time.monotonic()
    done = tokens = 0

    def advance(n: int, more: int = 0, /) -> None:
        nonlocal done, tokens, drawn
        done, tokens, now = done + n, tokens + more, time.monotonic()
        if not shown or now - drawn < _EVERY:
            return
        drawn, share = now, min(done / max(total, 1), 1.0)
        left = (now - begun) * (1 - share) / share if share else 0.0
        bar = ("#" * round(_WIDTH * share)).ljust(_WIDTH, "-")
        rate = f"  {tokens / (now - begun):,.0f} tokens/s" if speed else ""
        print(f"\r{what} {bar} {share:4.0%}  {left:,.0f} s left{rate}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def coloured(text: str, colour: str) -> str:
    """``text`` as standard output shows it: in a colour on a terminal, unless ``NO_COLOR`` is set."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns under their names; the first ``left`` begin, the others end together."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
