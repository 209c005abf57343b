"""How a setting is spelled on the command line, and which values it may have.

A dataclass whose fields are annotated with ``option`` is a group of command-line options, and ``check`` refuses values
that are out of range: name, default, help and range of a setting stand in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from outpace.errors import Argument, ParameterError


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a parameter is spelled on the command line. ``names``: none for an argument."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    within: str = ""
    bare: str | None = None
    group: str | None = None
    listing: tuple[str, Callable[[], Iterable[tuple[str, str]]]] | None = None


def option(
    *names: str,
    help: str,
    metavar: str | None = None,
    parser: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] = (),
    within: str = "",
    bare: str | None = None,
    group: str | None = None,
    listing: tuple[str, Callable[[], Iterable[tuple[str, str]]]] | None = None,
) -> Spelling:
    """An option's names and its help. ``parser`` makes its value of a text, and raises ValueError with a message.

    ``check`` allows one of ``choices``, and numbers ``within`` an interval, such as "(0, 1]": more than 0, at most 1.
    ``bare``: the value of an option that stands alone, with no file's name behind it. ``group``: the heading under
    which help shows it ("": the first); None: the ``GROUP`` of its dataclass, or the first. ``listing``: values with
    their meanings, and a heading, for the end of the help.
    """
    return Spelling(names, help, metavar, parser, choices, within, bare, group, listing)


def argument(*, help: str, metavar: str | None = None) -> Spelling:
    """An argument's help."""
    return Spelling((), help, metavar)


def spelling_of(hint: Any) -> tuple[Any, Spelling | None]:
    """The type of an annotation, and its spelling where it has one."""
    kind, *rest = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return kind, next((part for part in rest if isinstance(part, Spelling)), None)


def check(options: Any) -> None:
    """Check every field of a dataclass instance. Raises ParameterError that names the value and what is allowed."""
    for name, spelling in _spellings(type(options)):
        value = getattr(options, name)
        if value is None:
            continue
        if spelling.choices and value not in spelling.choices:
            raise ParameterError(Argument(name, value), f" is not known: use one of {', '.join(spelling.choices)}")
        if spelling.within and not _inside(value, spelling.within):
            raise ParameterError(Argument(name, value), f" is out of range: give a number in {spelling.within}")


def _spellings(kind: Any) -> Iterator[tuple[str, Spelling]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        _, spelling = spelling_of(hints[field.name])
        if spelling is not None:
            yield field.name, spelling


def _inside(value: float, interval: str) -> bool:
    low, high = (float(part) for part in interval[1:-1].split(","))
    return (low <= value if interval[0] == "[" else low < value) and (
        value <= high if interval[-1] == "]" else value < high
    )
