"""Command lines that are spelled plainly are read without typer, whose import takes a quarter of a first token's time.

Plainly: a known command, its options by their full names or single letters, each once, with values that leave no doubt.
Everything else, what is wrong and ``--help`` above all, is typer's; where both can read a command line, they read the
same (a test compares them).
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

from outpace.cli.command import Spelling, joined

COMMANDS = ("generate", "chat", "serve")  # those that a person waits for

_FORMS: dict[Any, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    int: (re.compile(r"[0-9]{1,15}", re.ASCII), int),
    float: (re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?", re.ASCII), float),
    str: (re.compile(r"(?!-)[^\ud800-\udfff]+"), str),  # which stand for bytes that are not UTF-8
    Path: (re.compile(r"(?!-)[^\ud800-\udfff\0]+"), Path),
}


class _Doubt(Exception):
    """This command line is typer's."""


def command(arguments: Sequence[str]) -> Callable[[], Any] | None:
    """The command with its parameters, or None where typer is to say what is asked for."""
    completes = any(name.endswith("_COMPLETE") for name in os.environ)
    if not arguments or arguments[0] not in COMMANDS or os.name == "nt" or completes:  # there click expands patterns
        return None
    _numpy()
    run = joined(import_module(f"outpace.cli.{arguments[0]}").run)
    try:
        return partial(run, **read(arguments[1:], inspect.signature(run).parameters))
    except _Doubt:
        return None


def _numpy() -> None:
    """Import numpy without the threads that its BLAS would start: nothing here multiplies there."""
    name = "OPENBLAS_NUM_THREADS"
    if "numpy" in sys.modules or name in os.environ:
        return
    os.environ[name] = "1"
    try:
        import_module("numpy")
    finally:
        del os.environ[name]  # others that we start may need theirs


def read(arguments: Sequence[str], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The values of all ``parameters``. Raises _Doubt."""
    known = {p.name: _Parameter(p) for p in parameters.values()}
    named = {name: its for its in known.values() for name in its.spelling.names}
    free = [its for its in known.values() if not its.spelling.names]
    given: dict[str, Any] = {}
    left = list(reversed(arguments))
    while left:
        text = left.pop()
        if not text.startswith("-"):
            if not free:
                raise _Doubt
            its = free.pop(0)
            given[its.name] = its.value(text)
            continue
        name, equals, value = text.partition("=") if text.startswith("--") else (text, "", "")
        if name not in named:
            raise _Doubt
        its = named[name]
        if its.name in given and not its.many:
            raise _Doubt
        if its.kind is bool:
            if equals:
                raise _Doubt
            given[its.name] = True
            continue
        if not equals:
            if not left:
                raise _Doubt
            value = left.pop()
        if its.many:
            given.setdefault(its.name, []).append(its.value(value))
        else:
            given[its.name] = its.value(value)
    missing = {name: its.default for name, its in known.items() if name not in given}
    if inspect.Parameter.empty in missing.values():
        raise _Doubt
    return {**missing, **given}


class _Parameter:
    """What a parameter of a command takes."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self.name, self.default = parameter.name, parameter.default
        hint, *said = get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else (None,)
        spelling = next((its for its in said if isinstance(its, Spelling)), None)
        assert spelling is not None, f"{parameter.name} does not say how it is spelled"
        self.spelling = spelling
        if get_origin(hint) is UnionType:
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
        self.many = get_origin(hint) is list
        self.kind = get_args(hint)[0] if self.many else hint

    def value(self, text: str) -> Any:
        """Raises _Doubt."""
        if self.spelling.parser is not None:
            try:
                return self.spelling.parser(text)
            except Exception as error:  # typer tells what is wrong
                raise _Doubt from error
        if self.kind not in _FORMS:
            raise _Doubt
        form, make = _FORMS[self.kind]
        if not form.fullmatch(text):
            raise _Doubt
        return make(text)
