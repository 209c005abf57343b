"""What commands do on a terminal: tables, colours, the editing of lines, Ctrl-C. Elsewhere plain text."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from outpace.errors import ParameterError

_CODES = {"green": "32", "red": "1;31", "yellow": "1;33", "bold green": "1;32", "dim": "2"}
_HISTORY = 1000  # lines that are kept
_IMPATIENT = 3  # times that Ctrl-C is pressed in vain


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """``text`` as ``stream`` (None: standard output) shows it: in a colour on a terminal that has some, unless
    ``NO_COLOR`` is set (no-color.org)."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if has_colours(stream) else text


def has_colours(stream: TextIO | None = None) -> bool:
    """Whether ``coloured`` changes anything."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and (stream or sys.stdout).isatty()


@contextmanager
def reading_text() -> Iterator[None]:
    """In the block, what is read from standard input is text: other bytes raise a ParameterError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ParameterError(f"standard input is not UTF-8 ({error.reason}): convert it") from error


@contextmanager
def line_editing(history: Path) -> Iterator[None]:
    """In the block ``input`` edits the line on a terminal, and the arrow keys find lines of before, which are kept in
    the file ``history``. Without Python's readline, as on Windows, it is the terminal's own plain input."""
    try:
        import readline
    except ModuleNotFoundError:
        readline = None  # type: ignore[assignment]
    if readline is None or not sys.stdin.isatty():
        yield
        return
    with suppress(OSError):  # none yet, or not readable: there is nothing to find
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY)
    try:
        yield
    finally:
        with suppress(OSError):  # lines that cannot be kept are no reason to fail
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(0o600)
            readline.write_history_file(history)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """In the block a Ctrl-C makes what is yielded true, and nothing else: an exception could end an engine's step
    midway. The third one, of a person who has waited, is a KeyboardInterrupt."""
    pressed = 0

    def press(*_: Any) -> None:
        nonlocal pressed
        pressed += 1
        if pressed == _IMPATIENT:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or somebody else's
        yield lambda: False
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed > 0
    finally:
        signal.signal(signal.SIGINT, before)


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
