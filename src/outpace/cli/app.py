"""The commands, each in a module that is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

from outpace.cli.command import Command, Group, choose, overview

NAMES = (  # each the module outpace.cli.NAME, whose COMMAND it is
    "generate",
    "bench",
    "chat",
    "serve",
    "verify",
    "trace",
    "explain",
    "learn",
    "race",
    "drafters",
    "plan",
    "report",
    "datastore",
    "train",
    "export",
    "cache",
    "doctor",
)


def command(name: str) -> Command | Group:
    found: Command | Group = import_module(f"outpace.cli.{name}").COMMAND
    return found


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """The call that a command line asks for. Raises UsageError, or SystemExit after ``--help`` and ``--version``."""
    if arguments[:1] == ["--version"]:
        from outpace.common.version import __version__

        print(__version__)
        raise SystemExit(0)
    name, rest = choose("outpace", arguments, NAMES, _help)
    return command(name).parse("outpace", rest)


def chosen(arguments: Sequence[str]) -> Command:
    """The command that a command line, which ``parse`` took, is of."""
    name, rest = choose("outpace", arguments, NAMES, _help)
    return command(name).chosen("outpace", rest)


def _help() -> str:
    about = "Speculative decoding of language models: the same tokens, sooner."
    example = "outpace generate 'Why is the sky blue?' --compare"
    return overview("outpace", about, example, {name: command(name) for name in NAMES})
