"""What error messages advise exists and works: options, commands, arguments, extras, files; and whoever follows them
gets on."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import outpace
from outpace import Engine, OutpaceError, SamplingParams, errors
from outpace.cli.app import NAMES, chosen, command
from outpace.cli.command import Command
from outpace.common.habits import HOMES
from outpace.common.option import spelling_of
from outpace.drafters.catalogue import METHODS
from outpace.drafters.registry import parse
from outpace.engine.intake import EngineOptions
from outpace.models.options import LoadOptions

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outpace"
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OutpaceError)}


@dataclass(frozen=True)
class Message:
    """A message as the source has it. ``text``: with ``{...}`` for what is filled in; ``arguments``: its ``Argument``s,
    name and value, as far as they stand there; ``packages``: what ``install`` is called with."""

    where: Path
    line: int
    text: str
    arguments: tuple[tuple[str, Any], ...]
    packages: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: {self.text}"


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return (
        f"<{node.args[0].value}>" if called(node) == "Argument" and isinstance(node.args[0], ast.Constant) else "{...}"
    )  # type: ignore[attr-defined]


def messages() -> Iterator[Message]:
    """Of every error that is raised on purpose, and of texts that such a message is made of."""
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if called(node) not in {*ERRORS, "UsageError", "APIError"}:
                continue
            assert isinstance(node, ast.Call)
            inside = [each for argument in node.args for each in ast.walk(argument) if isinstance(each, ast.Call)]
            given = [
                (
                    each.args[0].value,
                    each.args[1].value if isinstance(each.args[1:2][:1] and each.args[1], ast.Constant) else ...,
                )  # type: ignore[attr-defined]
                for each in inside
                if called(each) == "Argument" and isinstance(each.args[0], ast.Constant)
            ]
            packages = [a.value for each in inside if called(each) == "install" for a in each.args]  # type: ignore[attr-defined]
            text = "".join(text_of(argument) for argument in node.args)
            yield Message(where, node.lineno, text, tuple(given), tuple(packages))


ALL = list(messages())
COMMANDS = {
    name: entry
    for top in NAMES
    for found in [command(top)]
    for name, entry in (
        [(top, found)] if isinstance(found, Command) else [(f"{top} {c.name}", c) for c in found.commands]
    )
}


def options(entry: Command) -> set[str]:
    """Names of a command's options, also those without which a flag is turned off."""
    found = {name for _, hint, _ in entry.options() for name in spelling_of(hint)[1].names}  # type: ignore[union-attr]
    return found | {"--help", "-h"} | {name.replace("--", "--no-", 1) for name in found if name.startswith("--")}


def test_there_are_messages() -> None:
    assert len(ALL) > 400


def test_options_in_messages_are_of_the_command_that_raises_them() -> None:
    """A message of what others call, too, has an ``Argument``, which each spells in its own way."""
    wrong = []
    for message in ALL:
        parts = message.where.with_suffix("").parts
        own: set[str] = set()
        if parts[0] in ("cli", "server"):
            top = parts[1] if parts[0] == "cli" else "serve"
            raisers = [entry for name, entry in COMMANDS.items() if name.split()[0] == top] or list(COMMANDS.values())
            own = set.union(*(options(entry) for entry in raisers))
        for found in re.finditer(r"(?<![\w-])--?[a-z][a-z-]*", message.text):
            before = re.findall(r"outpace ((?:[a-z]+ )*[a-z]+)", message.text[: found.start()])
            named = next((COMMANDS[name] for name in COMMANDS if before and before[-1].startswith(name)), None)
            behind = message.text[: found.start()].endswith("{...} ") and found[0] == "--force-reinstall"  # pip's
            if not behind and found[0] not in (options(named) if named is not None else own):
                wrong.append(f"{found[0]} in {message}")
    assert not wrong, "\n".join(wrong)


def test_commands_and_functions_in_messages_are_there() -> None:
    wrong = []
    for message in ALL:
        for found in re.findall(r"\boutpace ((?:[a-z]+ ?)+)", message.text):
            words = found.split()
            if words[0] in NAMES and not any(" ".join(words[:n]) in COMMANDS for n in (1, 2)) and len(words) > 1:
                wrong.append(f"outpace {found}: {message}")
        for found in re.findall(r"\boutpace\.(\w+)", message.text):
            if found not in outpace.__all__:
                wrong.append(f"outpace.{found}: {message}")
        for found in re.findall(r"\bEngine\.(\w+)|\b(generate_many|unpatch)\b", message.text):
            if not hasattr(Engine, found[0] or found[1]) and found[1] not in outpace.__all__:
                wrong.append(f"{found}: {message}")
        for found in re.findall(r"\bdocs/[\w./#-]+", message.text):
            if not (ROOT / found.partition("#")[0]).is_file():
                wrong.append(f"{found}: {message}")
    assert not wrong, "\n".join(wrong)


def test_arguments_in_messages_are_taken_and_so_are_their_values() -> None:
    """By a public call, or by a command: somebody can give it."""
    taken = {name for names in HOMES.values() for name in names} | set(SamplingParams.__dataclass_fields__)
    taken |= {field for entry in COMMANDS.values() for field, _, _ in entry.options()}
    taken |= set(re.findall(r"^    (\w+):", "".join(p.read_text() for p in SOURCE.glob("server/api/*.py")), re.M))
    here = {
        name: set(re.findall(r"\b\w+(?=\s*[:=])", (SOURCE / name).read_text(encoding="utf-8")))
        for name in {message.where for message in ALL}
    }
    wrong = []
    for message in ALL:
        for name, value in message.arguments:
            if name not in taken and (message.where.parts[0] == "cli" or name not in here[message.where]):
                wrong.append(f"{name}: {message}")
            for kind in (LoadOptions, EngineOptions, SamplingParams):
                if value is not ... and name in kind.__dataclass_fields__:
                    kind(**{name: value})
    assert not wrong, "\n".join(wrong)


def test_what_is_to_be_installed_is_there_and_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").iterdir() if path.is_file())
    wrong = []
    for message in ALL:
        for package in message.packages:
            extra = re.fullmatch(r"outpace\[(\w+)\]", package)
            if extra[1] not in project["optional-dependencies"] if extra else package not in scripts:
                wrong.append(f"{package}: {message}")
    assert not wrong, "\n".join(wrong)
    assert sum(bool(message.packages) for message in ALL) > 8


def test_variables_in_messages_are_read() -> None:
    """Ours by our own code; others' are Hugging Face's and those of the CPU's libraries."""
    code = "".join(
        path.read_text(encoding="utf-8") for path in [*SOURCE.rglob("*.py"), *(ROOT / "native").rglob("*.cpp")]
    )
    for message in ALL:
        for name in re.findall(r"\b(?:OUTPACE|HF)_[A-Z_]+\b", message.text):
            read = rf'environ[^"\n]*"{name}"|getenv\("{name}"'
            assert re.search(read, code) or name in ("HF_HOME", "HF_ENDPOINT", "HF_TOKEN"), message
