"""Command lines that are read without typer mean what typer says they mean, and everything else is left to typer."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.cli import chat, generate, plainly, serve
from outpace.cli.command import flatten, joined

FUNCTIONS = {"generate": generate.run, "chat": chat.run, "serve": serve.run}
PARAMETERS = {name: inspect.signature(joined(run)).parameters for name, run in FUNCTIONS.items()}


def by_typer(name: str, arguments: list[str]) -> dict[str, Any] | None:
    """What typer would give the command; None where it refuses."""
    found: dict[str, Any] = {}
    command = flatten(FUNCTIONS[name])

    def seen(**given: Any) -> None:
        found.update(given)

    seen.__signature__ = inspect.signature(command)  # type: ignore[attr-defined]
    seen.__annotations__ = command.__annotations__
    app = typer.Typer(add_completion=False)
    app.command(name)(seen)
    app.callback()(lambda: None)
    try:
        app([name, *arguments], standalone_mode=False)
    except Exception:
        return None
    return found or None


def plain(name: str, arguments: list[str]) -> dict[str, Any] | None:
    try:
        return plainly.read(arguments, PARAMETERS[name])
    except plainly._Doubt:
        return None


NAMES = sorted({n for its in PARAMETERS.values() for p in its.values() for n in plainly._Parameter(p).spelling.names})
NUMBERS = ["1", "007", "0.5", "1e3", "1_0", "-1", "+1", " 2", "٣", "nan"]
VALUES = [*NUMBERS, "-", "--", "", "auto", "text", "a b", "x=y", "é", "\udc80"]
WORD = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(VALUES),
    st.builds("{}={}".format, st.sampled_from(NAMES), st.sampled_from(VALUES)),
    st.sampled_from(["--help", "--no-json", "--jso", "-v", "-vn", "-n1", "-nv"]),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FUNCTIONS)), st.lists(WORD, max_size=5))
def test_what_is_read_is_what_typer_reads(name: str, arguments: list[str]) -> None:
    found = plain(name, arguments)
    if found is not None:
        assert found == by_typer(name, arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_is_read_with_a_plain_value(name: str) -> None:
    values = {int: "3", float: "0.25", str: "some text", Path: "some/file", Any: "4"}
    for parameter in map(plainly._Parameter, PARAMETERS[name].values()):
        for spelling in parameter.spelling.names or ("",):
            value = [] if parameter.kind is bool else [values[parameter.kind]]
            arguments = [spelling, *value] if spelling else value
            found = plain(name, arguments)
            assert found is not None, arguments
            assert found == by_typer(name, arguments)
            assert found[parameter.name] != parameter.default
            if spelling.startswith("--") and value:
                assert plain(name, [f"{spelling}={value[0]}"]) == found
            if parameter.many:
                assert plain(name, arguments * 2) == by_typer(name, arguments * 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["a", "b"], ["--seed"], ["--seed", "x"], ["--seed=-1"], ["--json=1"],
        ["--seed", "1", "--seed", "2"], ["--size", "some"],
        ["--", "a"], ["-vn", "1"], ["--max-token", "1"], [""], ["--trace", "a\0b"],
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_typer(arguments: list[str]) -> None:
    assert plain("generate", arguments) is None


def test_no_typer_is_loaded_for_a_plain_command_line() -> None:
    code = (
        "import os, sys; from outpace.cli import plainly\n"
        "assert plainly.command(['generate', 'a', '-n', '1', '--json']) is not None\n"
        "found = {'typer', 'click', 'rich', 'pydantic', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not found, found\n"
        "assert 'OPENBLAS_NUM_THREADS' not in os.environ\n"
        "for words in ([], ['bench'], ['--version'], ['generate', '--help']):\n"
        "    assert plainly.command(words) is None\n"
        "os.environ['_OUTPACE_COMPLETE'] = 'bash_complete'\n"
        "assert plainly.command(['generate', 'a']) is None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
