"""How a function becomes a command: argparse reads options that the parameters' annotations define.

A command is a function whose parameters are annotated with ``option`` or ``argument``; a parameter whose type is a
dataclass stands for that dataclass's fields. Importing this must stay quick: a person waits for the first token.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from outpace.common.option import spelling_of
from outpace.errors import Argument


class Interrupted(Exception):
    """Ctrl-C ended a command; the message says what was kept."""


class UsageError(Exception):
    """A command line that means nothing; the message says why, and is empty where help was shown."""


@dataclass(frozen=True, slots=True)
class Command:
    """``function`` as the command ``name``; its docstring is the help."""

    name: str
    function: Callable[..., int]
    example: str

    @property
    def about(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    def options(self) -> Iterator[tuple[str, Any, Any]]:
        """The name, annotation and default (``inspect.Parameter.empty``: required) of each option and argument."""
        hints = get_type_hints(self.function, include_extras=True)
        for name, parameter in inspect.signature(self.function).parameters.items():
            yield from _fields(name, hints[name], parameter.default)

    def spell(self, argument: Argument) -> str:
        """An argument as this command spells it: ``max_tokens=0`` is ``--max-tokens 0``. What is no option stays."""
        names = {field: spelling_of(hint)[1].names for field, hint, _ in self.options()}  # type: ignore[union-attr]
        option = next((name for name in names.get(argument.name, ()) if name.startswith("--")), None)
        if option is None or argument.value is False or argument.value is None:
            return str(argument)
        if not argument.has_value or argument.value is True:
            return option
        return f"{option} {shlex.quote(str(argument.value))}"

    def chosen(self, program: str, arguments: Sequence[str]) -> Command:
        """The command that ``arguments`` are of."""
        return self

    def parse(self, program: str, arguments: Sequence[str]) -> Callable[[], int]:
        """The call that ``arguments`` ask for. Raises UsageError, or SystemExit after ``--help``."""
        hints = get_type_hints(self.function, include_extras=True)
        signature = inspect.signature(self.function).parameters
        parser = Parser(f"{program} {self.name}", self.about, self.example)
        for field, hint, default in self.options():
            parser.add(field, hint, default)
        given = vars(parser.read(arguments))
        verbose = bool(given.get("verbose"))
        call = {
            name: hints[name](**{f.name: given[f.name] for f in fields(hints[name])})
            if is_dataclass(hints[name])
            else given[name]
            for name in signature
        }

        def run() -> int:
            _log(verbose)
            return self.function(**call)

        return run


def _log(verbose: bool) -> None:
    """Log what takes a while, where a person waits."""
    if verbose or sys.stderr.isatty():
        logging.basicConfig(format="%(message)s", force=True)
        logging.getLogger("outpace" if verbose else "outpace.control.cost").setLevel(logging.INFO)


@dataclass(frozen=True, slots=True)
class Group:
    """Commands under one name."""

    name: str
    about: str
    example: str
    commands: tuple[Command, ...]

    def parse(self, program: str, arguments: Sequence[str]) -> Callable[[], int]:
        """See Command.parse."""
        return self.chosen(program, arguments).parse(f"{program} {self.name}", arguments[1:])

    def chosen(self, program: str, arguments: Sequence[str]) -> Command:
        """The command that ``arguments`` are of. Raises as ``choose``."""
        program = f"{program} {self.name}"
        known = {command.name: command for command in self.commands}
        name, _ = choose(program, arguments, known, lambda: overview(program, self.about, self.example, known))
        return known[name]


def choose(
    program: str, arguments: Sequence[str], known: Collection[str], help: Callable[[], str]
) -> tuple[str, Sequence[str]]:
    """The command that ``arguments`` name, and what follows it. Raises UsageError, or SystemExit after ``--help``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help())
        if arguments:
            raise SystemExit(0)
        raise UsageError
    if arguments[0] not in known:
        kind = "option" if arguments[0].startswith("-") else "command"
        raise UsageError(f"{program} has no {kind} {arguments[0]}{_meant(arguments[0], known)}")
    return arguments[0], arguments[1:]


def overview(program: str, about: str, example: str, commands: Mapping[str, Command | Group]) -> str:
    """Help of what has commands."""
    longest = max(map(len, commands))
    lines = [f"  {name:<{longest}}  {_sentence(command.about)}" for name, command in commands.items()]
    return "\n".join([f"usage: {program} COMMAND ...", "", about, "", "commands:", *lines, "", f"Example: {example}"])


def _sentence(text: str) -> str:
    first = " ".join(text.split("\n\n")[0].split())
    return textwrap.shorten(first.split(". ")[0].rstrip("."), 100, placeholder=" ...") + "."


def _meant(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f": did you mean {close[0]}?" if close else ""


def _fields(name: str, hint: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, annotation and default of each option that a parameter stands for."""
    if not is_dataclass(hint):
        yield name, hint, default
        return
    own = get_type_hints(hint, include_extras=True)
    for field in fields(hint):
        yield field.name, own[field.name], inspect.Parameter.empty if field.default is MISSING else field.default


class _Help(argparse.HelpFormatter):
    """Help with paragraphs kept, as wide as the terminal up to what is easy to read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(shutil.get_terminal_size().columns, 200))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in (textwrap.wrap(part, width) or [""])]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


class Parser:
    """argparse, filled from annotations."""

    def __init__(self, program: str, about: str, example: str) -> None:
        self._parser = _Arguments(
            program, description=about, epilog=f"Example: {example}", formatter_class=_Help, allow_abbrev=False
        )
        self._lazy: list[tuple[argparse.Action, Callable[[], str]]] = []
        self._bare: dict[str, str] = {}

    def add(self, name: str, hint: Any, default: Any) -> None:
        """A parameter annotated with ``Annotated[type, Spelling]``."""
        kind, spelling = spelling_of(hint)
        assert spelling is not None, f"{name} is annotated with neither option nor argument"
        if get_origin(kind) is UnionType:
            (kind,) = (each for each in get_args(kind) if each is not NoneType)
        many, required = get_origin(kind) is list, default is inspect.Parameter.empty
        kind = get_args(kind)[0] if many else kind
        text = spelling.help
        shown: dict[str, Any] = {"help": "" if callable(text) else text.replace("%", "%%")}
        if kind is bool:  # one that is on by default has --no-NAME, too
            flag: Any = argparse.BooleanOptionalAction if default is True else "store_true"
            action = self._parser.add_argument(*spelling.names, action=flag, default=default, dest=name, **shown)
        elif not spelling.names:
            count = "+" if many else None if required else "?"
            shown["metavar"] = spelling.metavar or name.upper()
            default = None if required else default
            action = self._parser.add_argument(name, type=kind, nargs=count, default=default, **shown)
        else:
            shown |= {"metavar": spelling.metavar or _METAVARS.get(kind, "TEXT"), "dest": name, "required": required}
            if not required and default not in (None, "", ()) and "efault:" not in shown["help"]:
                shown["help"] += f" [{default}]"
            action = self._parser.add_argument(
                *spelling.names,
                type=_typed(spelling.parser) if spelling.parser is not None else kind,
                action="append" if many else "store",
                default=None if required else default,
                **shown,
            )
        if callable(text):
            self._lazy.append((action, text))
        if spelling.bare is not None:
            self._bare |= dict.fromkeys(spelling.names, spelling.bare)

    def _completed(self, arguments: Sequence[str]) -> Iterator[str]:
        """``arguments``, each option that may stand alone with its value. A file's name is what looks like one: the
        word behind ``--json`` may as well be a prompt."""
        words = iter(arguments)
        for word in words:
            if word not in self._bare:
                yield word
                continue
            following = next(words, None)
            if following is not None and following.endswith((".json", ".jsonl")) and " " not in following:
                yield f"{word}={following}"
                continue
            yield f"{word}={self._bare[word]}"
            if following is not None:
                yield from self._completed([following])

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError, or SystemExit after ``--help``."""
        if not {"-h", "--help"}.isdisjoint(arguments):
            for action, text in self._lazy:
                action.help = text().replace("%", "%%")
        found, unknown = self._parser.parse_known_args(list(self._completed(arguments)))
        if unknown:
            name = next((word for word in unknown if word.startswith("-")), None)
            if name is None:
                raise UsageError(f"{unknown[0]!r} is one argument too many: quote text that has spaces")
            name = name.partition("=")[0]
            raise UsageError(f"there is no option {name}{_meant(name, self._parser.names)}")
        return found


class _Arguments(argparse.ArgumentParser):
    @property
    def names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def format_usage(self) -> str:
        free = [action for action in self._actions if not action.option_strings]
        words = [f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar) for action in free]
        needed = [f"{a.option_strings[0]} {a.metavar}" for a in self._actions if a.required and a not in free]
        return " ".join(["usage:", self.prog, *needed, "[options]", *words]) + "\n"

    def format_help(self) -> str:
        whole = super().format_help()
        return self.format_usage() + whole[whole.index("\n\n") + 1 :]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}


def _typed(parser: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parser(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
