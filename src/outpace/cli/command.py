"""How a function becomes a command: options from dataclasses, logging, and Ctrl-C as an error like any other.

What a parameter says of itself (``option``, ``argument``) becomes typer's own once typer is needed: importing that
takes as long as loading a small model, and a plainly spelled command line does without it (plainly.py).
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_args, get_origin, get_type_hints

Command = Callable[..., Any]


class Interrupted(Exception):
    """Ctrl-C ended a command; the message says what was kept."""


class UsageError(Exception):
    """A command line that means nothing; the message says why, and is empty where help was shown."""


class ReaderLeft(Exception):
    """Whoever read our output has gone, as ``head`` does."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a parameter is spelled on the command line. ``names``: none for an argument."""

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None

    def for_typer(self) -> Any:
        """The same in typer's words."""
        import typer

        if not self.names:
            return typer.Argument(help=self.help, metavar=self.metavar)
        return typer.Option(*self.names, help=self.help, metavar=self.metavar, parser=self.parser)


def option(*names: str, help: str, metavar: str | None = None, parser: Callable[[str], Any] | None = None) -> Any:
    """An option's names and what help says of it; ``parser`` makes its value of a text."""
    return Spelling(names, help, metavar, parser)


def argument(*, help: str, metavar: str | None = None) -> Any:
    """What help says of an argument."""
    return Spelling((), help, metavar)


def flatten(function: Command) -> Command:
    """The command of a function, for typer."""
    command = joined(function)
    its = inspect.signature(command).parameters.values()
    parameters = [parameter.replace(annotation=_for_typer(parameter.annotation)) for parameter in its]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return _signed(command, parameters)


def _for_typer(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    kind, *said = get_args(hint)
    return Annotated[(kind, *(its.for_typer() if isinstance(its, Spelling) else its for its in said))]


def joined(function: Command) -> Command:
    """Let every parameter whose type is a dataclass appear as that dataclass's fields."""
    hints = get_type_hints(function, include_extras=True)
    parameters, groups = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if not (isinstance(hint, type) and is_dataclass(hint)):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        own = get_type_hints(hint, include_extras=True)
        groups[name] = hint, [f.name for f in fields(hint)]
        for f in fields(hint):
            default = f.default if f.default is not MISSING else None
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=own[f.name])
            )

    @wraps(function)
    def command(**given: Any) -> Any:
        for name, (kind, members) in groups.items():
            given[name] = kind(**{member: given.pop(member) for member in members})
        common = given.get("common")
        verbose = common is not None and common.verbose
        if verbose or sys.stderr.isatty():  # a person waits: what takes a while is said
            logging.basicConfig(format="%(message)s", force=True)
            logging.getLogger("outpace" if verbose else "outpace.control.cost").setLevel(logging.INFO)
        try:
            return function(**given)
        except KeyboardInterrupt as error:  # typer would end on its own terms, and without a word
            raise Interrupted("interrupted") from error
        except BrokenPipeError as error:
            raise ReaderLeft from error

    return _signed(command, parameters)


def _signed(command: Any, parameters: list[inspect.Parameter]) -> Command:
    """The command, which says that these are its parameters."""
    command.__signature__ = inspect.Signature(parameters)
    signed: Command = command
    return signed
