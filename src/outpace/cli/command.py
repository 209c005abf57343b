"""How a function becomes a command: argparse reads options that the parameters' annotations define.

A command is a function whose parameters are annotated with ``option`` or ``argument``; a parameter whose type is a
dataclass stands for its fields, each ``defined``. Importing this must stay quick: a person waits for the first token.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from outpace.common.habits import OTHER_OPTIONS, SAME_OPTIONS
from outpace.common.parameter import REQUIRED, Parameter, annotated, definitions
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
    example: str  # several are lines

    @property
    def about(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    def parts(self) -> Iterator[tuple[str, Any, Mapping[str, Parameter]]]:
        """Of each parameter of the function its name, its type, and the options and arguments that it stands for."""
        hints = get_type_hints(self.function, include_extras=True)
        for name, parameter in inspect.signature(self.function).parameters.items():
            kind: Any = hints[name]
            if is_dataclass(hints[name]):
                yield name, kind, {n: each for n, each in definitions(kind).items() if each.option is not None}
            else:
                yield name, kind, {name: annotated(name, kind, parameter.default)}

    def options(self) -> list[Parameter]:
        """All options and arguments."""
        return [each for _, _, parameters in self.parts() for each in parameters.values()]

    def spell(self, argument: Argument) -> str:
        """An argument as this command spells it: ``max_tokens=0`` is ``--max-tokens 0``. What is no option stays."""
        names = next((each.option or () for each in self.options() if each.name == argument.name), ())
        option = next((name for name in names if name.startswith("--")), None)
        if option is None and argument.name == "raw":  # another command does it
            return "outpace generate --raw"
        if option is None and argument.name == "model" and argument.has_value:  # it is the word behind the command
            return str(argument.value)
        if option is None or argument.value is False or argument.value is None:
            return str(argument)
        if not argument.has_value or argument.value is True:
            return option
        value = str(argument.value)
        return f"{option}{'=' if re.match('-[^0-9]', value) else ' '}{shlex.quote(value)}"

    def chosen(self, program: str, arguments: Sequence[str]) -> Command:
        """The command that ``arguments`` are of."""
        return self

    def parse(self, program: str, arguments: Sequence[str]) -> Callable[[], int]:
        """The call that ``arguments`` ask for. Raises UsageError, or SystemExit after ``--help``."""
        parser = Parser(f"{program} {self.name}", self.about, self.example)
        for parameter in sorted(self.options(), key=lambda each: each.default is not REQUIRED):
            parser.add(parameter)
        given = vars(parser.read(arguments))
        verbose = bool(given.get("verbose"))
        call = {
            name: kind(**{n: given[n] for n in parameters}) if isinstance(kind, type) else given[name]
            for name, kind, parameters in self.parts()
        }

        def run() -> int:
            _log(verbose)
            return self.function(**call)

        return run


_SHOWN = ("outpace.control.cost", "outpace.drafters.registry", "outpace.models.native.weight_cache.progress")


def _log(verbose: bool) -> None:
    """Log what takes a while, where a person waits."""
    if verbose or sys.stderr.isatty():
        logging.basicConfig(format="%(message)s", force=True)
        for name in ("outpace",) if verbose else _SHOWN:
            logging.getLogger(name).setLevel(logging.INFO)


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
        name, _ = choose(
            program, arguments, known, lambda: overview(program, self.about, self.example, {"commands": known})
        )
        return known[name]


def choose(
    program: str, arguments: Sequence[str], known: Collection[str], help: Callable[[], str], remedy: str = ""
) -> tuple[str, Sequence[str]]:
    """The command that ``arguments`` name, and what follows it. Raises UsageError, with ``remedy`` where no name is
    near, or SystemExit after ``--help``."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help())
        if arguments:
            raise SystemExit(0)
        raise UsageError
    if arguments[0] not in known:
        kind = "option" if arguments[0].startswith("-") else "command"
        raise UsageError(f"{program} has no {kind} {arguments[0]}{_meant(arguments[0], known) or remedy}")
    return arguments[0], arguments[1:]


def overview(program: str, about: str, example: str, groups: Mapping[str, Mapping[str, Command | Group]]) -> str:
    """Help of what has commands, in groups with a title each."""
    wide = max(len(name) for commands in groups.values() for name in commands) + 4
    lines: list[str] = []
    for title, commands in groups.items():
        lines += [f"{title}:", *_columns(((n, _sentence(c.about)) for n, c in commands.items()), wide), ""]
    more = f"{program} COMMAND --help shows a command's options."
    return "\n".join([f"usage: {program} COMMAND ...", "", about, "", *lines, more, "", _examples(example)])


def _sentence(text: str) -> str:
    first = " ".join(text.split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") + "."


def _columns(entries: Iterable[tuple[str, str]], wide: int = 0) -> list[str]:
    """Lines of names and, beside them, their meanings, which are wrapped; these begin at column ``wide`` (0: behind
    the longest name)."""
    entries = list(entries)
    wide = wide or max(len(name) for name, _ in entries) + 4
    return [
        line
        for name, text in entries
        for line in textwrap.wrap(text, _width(), initial_indent=f"  {name}".ljust(wide), subsequent_indent=" " * wide)
    ]


def _examples(example: str) -> str:
    lines = example.splitlines()
    return f"Example: {example}" if len(lines) == 1 else "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def _width() -> int:
    """Of the terminal, up to what is easy to read."""
    return min(shutil.get_terminal_size().columns, 120)


def _meant(name: str, known: Collection[str]) -> str:
    """A name like ``name``, misspelt or cut short; names that other programs have are less like ours."""
    bare = name.lstrip("-")
    near = {each.lstrip("-"): each for each in known if each.startswith(name) or abs(len(each) - len(name)) <= 2}
    close = difflib.get_close_matches(bare, near, 1, 0.75)
    return f": did you mean {near[close[0]]}?" if close else ""


class _Help(argparse.HelpFormatter):
    """Help with paragraphs and indented lines kept, and an option's short name before its long one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join(
            part if "\n " in part else textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False)
            for part in parts
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(sorted(action.option_strings, key=lambda name: name.startswith("--")))
        return names if action.nargs == 0 else f"{names} {action.metavar}"


_HEADINGS = (
    "drafting", "sampling", "end of the answer", "form of the answer", "another machine", "measuring",
    "the network and its loss", "what it learns from", "learning", "evaluations and snapshots", "limits", "output",
    "loading the model",
)  # fmt: skip


class Parser:
    """argparse, filled from definitions."""

    def __init__(self, program: str, about: str, example: str) -> None:
        self._parser = _Arguments(program, description=about, formatter_class=_Help, allow_abbrev=False)
        self._example = example
        self._groups: dict[str, Any] = {name: self._parser.add_argument_group(name) for name in _HEADINGS}
        self._groups[""] = self._parser
        self._listings: list[tuple[str, Callable[[], Iterable[tuple[str, str]]]]] = []
        self._bare: dict[str, str] = {}

    def add(self, parameter: Parameter) -> None:
        """An option or an argument."""
        kind, default, names = parameter.kind, parameter.default, parameter.option
        many, required = get_origin(kind) in (list, tuple), default is REQUIRED
        kind = get_args(kind)[0] if many else str if get_origin(kind) is Literal else kind
        default = None if required or callable(default) else default
        shown: dict[str, Any] = {"help": parameter.meaning.replace("%", "%%")}
        parse = parameter.parser or _NUMBERS.get(kind)
        into = self._groups["" if required else parameter.group or ""]
        if kind is bool:  # one that is on by default has --no-NAME, too
            flag: Any = argparse.BooleanOptionalAction if default is True else "store_true"
            into.add_argument(*names or (), action=flag, default=default, dest=parameter.name, **shown)
        elif not names:
            count = "+" if many else None if required else "?"
            shown["metavar"] = parameter.metavar or parameter.name.upper()
            self._parser.add_argument(parameter.name, type=kind, nargs=count, default=default, **shown)
        else:
            shown |= {"metavar": parameter.metavar or _METAVARS.get(kind, "TEXT"), "required": required}
            if default not in (None, "", ()) and "efault:" not in shown["help"]:
                shown["help"] += f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
            into.add_argument(
                *names,
                dest=parameter.name,
                type=_typed(parse) if parse is not None else kind,
                action="append" if many else "store",
                default=default or None if many else default,
                **shown,
            )
        if parameter.listing is not None:
            self._listings.append(parameter.listing)
        if parameter.bare is not None:
            self._bare |= dict.fromkeys(names or (), parameter.bare)

    def _ours(self, arguments: Sequence[str]) -> Iterator[str]:
        """``arguments``, options of other tools that mean the same replaced. Raises UsageError for their others, with
        what there is instead."""
        own = self._parser.names
        words, free = iter(arguments), list[str]()
        for word in words:
            if word == "--":
                break
            name, given, value = word.partition("=")
            if not word.startswith("-") or name in own:
                yield word
            elif (same := SAME_OPTIONS.get(name)) in own:
                yield f"{same}{given}{value}"
            elif same is not None and same in self._parser.free:
                text = value if given else next(words, None)
                if text is None:
                    raise UsageError(f"{name} wants a {same}")
                free.append(text)
            elif same == "prompt" and not _meant(name, own):
                raise UsageError(f"there is no option {name}: outpace generate 'TEXT' answers one prompt")
            elif name in OTHER_OPTIONS and _applies(OTHER_OPTIONS[name], own):
                raise UsageError(f"there is no option {name}: {OTHER_OPTIONS[name]}")
            else:
                yield word
        free += words
        if free:  # no option, whatever it begins with
            yield from ("--", *free)

    def _completed(self, arguments: Sequence[str]) -> Iterator[str]:
        """``arguments``, each option that may stand alone with its value. The word behind it, as behind ``--json``, may
        as well be a prompt: a file's name has no space, and a suffix or a folder that is there."""
        words = iter(arguments)
        for word in words:
            if word == "--":
                yield from (word, *words)
            elif word not in self._bare:
                yield word
            else:
                following = next(words, None)
                if following is not None and _names_file(following):
                    yield f"{word}={following}"
                    continue
                yield f"{word}={self._bare[word]}"
                if following is not None:
                    yield from self._completed([following, *words])

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Raises UsageError, or SystemExit after ``--help``."""
        arguments = list(self._ours(arguments))
        if not {"-h", "--help"}.isdisjoint(arguments):
            lists = ("\n".join([f"{title}:", *_columns(entries())]) for title, entries in self._listings)
            self._parser.epilog = "\n\n".join([*lists, _examples(self._example)])
        found, unknown = self._parser.parse_known_args(list(self._completed(arguments)))
        if unknown:
            name = next((word for word in unknown if word.startswith("-") and word != "-"), None)
            if name is None:
                alone = "it takes options alone; outpace generate 'TEXT' answers one prompt"
                remedy = "quote text that has spaces" if self._parser.free else alone
                raise UsageError(f"{unknown[0]!r} is one argument too many: {remedy}")
            name = name.partition("=")[0]
            raise UsageError(f"there is no option {name}{_meant(name, self._parser.names)}")
        return found


def _names_file(word: str) -> bool:
    path = Path(word)
    folder = "/" in word and path.parent.is_dir()
    return not re.search(r"^-|\s", word) and (folder or re.search(r"\.\w{1,8}$", word) is not None)


def _applies(hint: str, own: Collection[str]) -> bool:
    """Whether a command with the options ``own`` can do what ``hint`` says."""
    named = re.findall(r"--[a-z][a-z-]+", hint)
    return not named or any(name in own for name in named)


class _Arguments(argparse.ArgumentParser):
    def __init__(self, program: str, **options: Any) -> None:
        super().__init__(program, **options)
        self._positionals.title = "arguments"

    @property
    def free(self) -> list[str]:
        """Names of arguments that are no options."""
        return [action.dest for action in self._actions if not action.option_strings]

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
        message = message.removeprefix("argument ")
        names, lacks, _ = message.partition(": expected one argument")
        if lacks:
            message += f": give one, as {max(names.split('/'), key=len)}=VALUE where it begins with -"
        raise UsageError(message)


_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}


def _number(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is no {name}: give one") from None

    return parsed


_NUMBERS: dict[Any, Callable[[str], Any]] = {int: _number(int, "whole number"), float: _number(float, "number")}


def _typed(parser: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parser(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
