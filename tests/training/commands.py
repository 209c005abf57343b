"""Commands that train, run in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

from outpace.cli.app import parse


def outpace(*arguments: object) -> str:
    """What a command prints; what it raises."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        parse([str(a) for a in arguments])()
    return printed.getvalue()
