"""What commands do on a terminal: tables, colours, the editing of lines, Ctrl-C. Elsewhere plain text."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from outpace.errors import ParameterError

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_CODES = {
    "green": "32", "cyan": "36", "magenta": "35", "blue": "34", "red": "1;31", "yellow": "1;33", "bold green": "1;32",
    "dim": "2",
}  # fmt: skip
_DRAFTERS = ("green", "cyan", "magenta", "blue")
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


class Colours:
    """Which colour a drafter's tokens have: the parts of ``drafter`` ("suffix+eagle:demo") in order, then as met."""

    def __init__(self, drafter: str) -> None:
        self._colours: dict[str, str] = {}
        for name in () if drafter == "none" else drafter.split("+"):
            self.of(name)

    def of(self, source: str) -> str:
        return self._colours.setdefault(source, _DRAFTERS[len(self._colours) % len(_DRAFTERS)])

    def written(self, text: str, source: str) -> str:
        """``text`` in the colour of who wrote it; the target's own has none."""
        return text if source == "target" or not text else coloured(text, self.of(source))

    @property
    def legend(self) -> str:
        """What each colour stands for."""
        named = [coloured(f"{colour}: drafted by {name}", colour) for name, colour in self._colours.items()]
        return "; ".join([*named, "the rest: the model's own"])


def columns() -> int:
    """Of the terminal; 80 where there is none."""
    return shutil.get_terminal_size().columns


def folded(text: str, stream: TextIO | None = None) -> str:
    """A line as ``stream`` (None: standard output) shows it: on a terminal wrapped between words, whose colours take no
    place."""
    if not (stream or sys.stdout).isatty():
        return text
    if "\x1b" not in text:
        return textwrap.fill(text, columns(), break_on_hyphens=False)
    lines, used = [""], 0
    for word in text.split(" "):
        width = len(_COLOUR.sub("", word))
        if used and used + 1 + width > columns():
            lines.append("")
            used = 0
        lines[-1] += f" {word}" if used else word
        used += width + (used > 0)
    return "\n".join(lines)


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


def bar(value: float, low: float, high: float, most: float, wide: int) -> str:
    """``value`` as a bar of ``#`` in at most ``wide`` characters, which ``most`` fills; ``-`` from ``low`` to ``high``,
    the interval, and ``|`` at the value."""
    at, begin, end = (min(max(round(wide * x / most), 1), wide) - 1 if most else 0 for x in (value, low, high))
    marks = ["#" if i < begin else "-" if i <= end else " " for i in range(wide)]
    marks[at] = "|"
    return "".join(marks).rstrip()
