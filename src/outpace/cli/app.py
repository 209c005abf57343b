"""The commands, each in a module that is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import takewhile

from outpace.cli.command import Command, Group, choose, overview

GROUPS = {  # each name the module outpace.cli.NAME, whose COMMAND it is
    "answer": ("generate", "chat", "serve"),
    "measure and choose": ("bench", "drafters", "plan", "report"),
    "understand": ("learn", "race"),
    "check and look inside": ("verify", "trace", "explain"),
    "make drafters": ("datastore", "train", "export"),
    "this machine": ("pull", "list", "cache", "doctor"),
}
NAMES = tuple(name for names in GROUPS.values() for name in names)
_REMEDY = ": a command comes first, as in outpace generate 'Hello?' -m demo; text with spaces, quoted, needs none"


def command(name: str) -> Command | Group:
    found: Command | Group = import_module(f"outpace.cli.{name}").COMMAND
    return found


def parse(arguments: Sequence[str]) -> Callable[[], int]:
    """The call that a command line asks for. Raises UsageError, or SystemExit after ``--help`` and ``--version``."""
    if arguments[:1] == ["--version"]:
        from outpace.common.version import __version__

        print(__version__)
        raise SystemExit(0)
    name, rest = choose("outpace", _ours(arguments), NAMES, _help, _REMEDY)
    return command(name).parse("outpace", rest)


def chosen(arguments: Sequence[str]) -> Command:
    """The command that a command line, which ``parse`` took, is of."""
    name, rest = choose("outpace", _ours(arguments), NAMES, _help, _REMEDY)
    return command(name).chosen("outpace", rest)


def _ours(arguments: Sequence[str]) -> Sequence[str]:
    """A command line as ours: a question alone is answered, and Ollama's ``run``, ``ls`` and ``rm`` are known."""
    match list(arguments):
        case [question, *rest] if len(question.split()) > 1 and not question.startswith("-"):
            return ["generate", question, *rest]
        case ["run", model, prompt, *rest] if not model.startswith("-") and not prompt.startswith("-"):
            return ["generate", prompt, "-m", model, *rest]
        case ["run", model, *rest] if not model.startswith("-"):
            return ["chat", "-m", model, *rest]
        case ["run", *rest]:
            return ["chat", *rest]
        case ["ls", *rest]:
            return ["list", *rest]
        case ["rm", "--help" | "-h", *_]:
            return ["cache", "--help"]
        case ["rm", *rest]:
            names = [*takewhile(lambda word: not word.startswith("-"), rest)]
            removed = [part for name in names for part in ("--remove", name)]
            return ["cache", *(removed or ["--remove"]), *rest[len(names) :]]
    return arguments


def _help() -> str:
    about = "Speculative decoding of language models: the same tokens, sooner."
    examples = (
        "outpace 'Why is the sky blue?'              # generate, with the demo model\n"
        "outpace run user/repo:Q4_K_M                # chat\n"
        "outpace generate 'Count to ten.' --compare  # drafted beside plain\n"
        "outpace serve -m model.gguf                 # OpenAI's API"
    )
    groups = {title: {name: command(name) for name in names} for title, names in GROUPS.items()}
    return overview("outpace", about, examples, groups)
