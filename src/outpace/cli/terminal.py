"""What commands draw on a terminal: tables, colours. Elsewhere plain text."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_CODES = {"green": "32", "red": "1;31", "yellow": "1;33", "bold green": "1;32"}


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
