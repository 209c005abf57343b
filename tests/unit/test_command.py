"""The command line: what is given, what is refused with a suggestion, what help shows, and how little is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from outpace.cli import app, terminal
from outpace.cli.command import Command, Group, UsageError
from outpace.cli.options import Common
from outpace.common.installing import install
from outpace.common.parameter import argument, defined, option
from outpace.errors import ParameterError
from outpace.params import PARAMETERS


@dataclass(frozen=True)
class Shared:
    seed: int | None = defined(None, "Drawn.", option=("--seed", "-s"))
    loud: bool = defined(False, "100 % loud.", option=("--loud", "-l"))


SEEN: dict[str, Any] = {}


def some(
    shared: Shared,
    out: Annotated[Path, option("A file.")],
    text: Annotated[str | None, argument("Words.")] = None,
    word: Annotated[list[str] | None, option("Repeatable.")] = None,
    share: Annotated[float, option("A share.")] = 0.5,
    wide: Annotated[bool, option("On by default.")] = True,
    even: Annotated[int, option("An even number.", parser=lambda text: _even(text))] = 2,
) -> int:
    """Do something. And more.

    A second paragraph.
    """
    SEEN.update(shared=shared, out=out, text=text, word=word, share=share, wide=wide, even=even)
    return 3


def _even(text: str) -> int:
    if int(text) % 2:
        raise ValueError(f"{text} is odd: give an even number")
    return int(text)


COMMAND = Command("some", some, "outpace some --out x")


def given(*arguments: str) -> dict[str, Any]:
    SEEN.clear()
    assert COMMAND.parse("outpace", arguments)() == 3
    return dict(SEEN)


def test_what_is_given_arrives_with_its_type() -> None:
    plain = given("--out", "x")
    assert plain == {
        "shared": Shared(), "out": Path("x"), "text": None, "word": None, "share": 0.5, "wide": True, "even": 2
    }  # fmt: skip
    found = given("--seed=7", "--word", "a", "hello there", "--word=b=c", "-l", "--share=-1e3", "--no-wide",
                  "--even", "-4", "--out", "y")  # fmt: skip
    assert found == {
        "shared": Shared(7, True), "out": Path("y"), "text": "hello there", "word": ["a", "b=c"], "share": -1000.0,
        "wide": False, "even": -4,
    }  # fmt: skip
    assert given("-ls7", "--out", "x", "--", "--text")["text"] == "--text"
    assert given("-ls7", "--out", "x")["shared"] == Shared(7, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--out"),
        (["--out", "x", "--wrod", "a"], "there is no option --wrod: did you mean --word?"),
        (["--out", "x", "--sha=1"], "there is no option --sha: did you mean --share?"),
        (["--out", "x", "a", "b"], "'b' is one argument too many: quote text that has spaces"),
        (["--out", "x", "a", "-"], "'-' is one argument too many"),
        (["--out", "x", "--seed", "y"], "--seed/-s: 'y' is no whole number: give one"),
        (["--out", "x", "--even", "3"], "--even: 3 is odd: give an even number"),
        (["--out"], "--out: expected one argument: give one, as --out=VALUE where it begins with -"),
        (["--word", "-x", "--out", "y"], "as --word=VALUE where it begins with -"),
    ],
)
def test_what_means_nothing_is_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        COMMAND.parse("outpace", arguments)
    assert says in str(caught.value)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        COMMAND.parse("outpace", ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: outpace some --out PATH [options] [TEXT]\n\nDo something. And more.\n\nA second")
    for part in ("100 % loud.", "A share. [0.5]", "--wide, --no-wide", "Example: outpace some --out x"):
        assert part in text


def test_a_group_shows_its_commands_and_passes_on(capsys: pytest.CaptureFixture[str]) -> None:
    group = Group("many", "Does much.", "outpace many some", (COMMAND,))
    assert group.parse("outpace", ["some", "--out", "x"])() == 3
    with pytest.raises(UsageError, match=r"outpace many has no command smoe: did you mean some\?"):
        group.parse("outpace", ["smoe"])
    with pytest.raises(UsageError, match=r"^$"):
        group.parse("outpace", [])
    assert "  some  Do something.\n" in capsys.readouterr().out


def test_help_has_headings_with_what_is_used_most_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.parse(["generate", "--help"])
    text = capsys.readouterr().out
    heads = [line.rstrip(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads[:3] == ["arguments", "options", "drafting"]
    assert heads[-3:] == ["loading the model", "drafters (their options: docs/drafters.md)", "Examples"]
    first = text[: text.index("\ndrafting:")]
    assert all(name in first for name in ("--model", "--drafter", "--temperature", "--max-tokens", "--compare"))
    assert "--allow-pickle" not in first
    assert len(first.splitlines()) < 24


@pytest.mark.parametrize("width", ["80", "100", "200"])
def test_no_help_is_cut(width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    with pytest.raises(SystemExit):
        app.parse(["--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= int(width)
    assert "..." not in text.replace("COMMAND ...", "")
    for name in app.NAMES:
        first = " ".join(app.command(name).about.split("\n\n")[0].split()).split(". ")[0]
        assert first.rstrip(".") in " ".join(text.split())


def test_every_parameter_with_an_option_is_one_of_generates(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app.parse(["generate", "--help"])
    text = capsys.readouterr().out
    for parameter in PARAMETERS.values():
        assert all(f"{name}" in text for name in parameter.option or ())


def test_a_command_line_is_read_without_heavy_imports() -> None:
    code = (
        "import os, sys\n"
        "from outpace.cli import main\n"
        "sys.argv = ['outpace', 'generate', 'a', '-n', '1', '--json']\n"
        "main._command()\n"
        "found = {'typer', 'click', 'rich', 'pydantic', 'tokenizers', 'jinja2', 'torch'} & set(sys.modules)\n"
        "assert not found, found\n"
        "assert 'OPENBLAS_NUM_THREADS' not in os.environ"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", ["hi --json out.txt", "--json=out hi", "hi --json=out", "hi --json o/ut", "--json out.txt hi"]
)
def test_any_file_takes_json(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "o").mkdir()

    def write(common: Common, prompt: Annotated[str | None, argument("A prompt.")] = None) -> int:
        assert prompt == "hi"
        assert not common.emit({})
        return 0

    assert Command("write", write, "").parse("outpace", words.split())() == 0
    assert [path.read_text().strip() for path in tmp_path.rglob("*") if path.is_file()] == ["{}"]


@pytest.mark.parametrize(
    ("words", "prompt"),
    [("--json Hello", "Hello"), ("--json and/or", "and/or"), ("--prompt=-x --json", "-x"), ("--json -p -x", "-x"),
     ("--json -- -x", "-x"), ("-- --json", "--json"), ("--json -- --json", "--json")],
)  # fmt: skip
def test_a_prompt_is_no_file_and_no_option(
    words: str, prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Hello").write_text("precious")

    def show(common: Common, prompt: Annotated[str | None, argument("A prompt.")] = None) -> int:
        print(prompt)
        return 0

    command = Command("show", show, "")
    assert command.parse("outpace", words.split())() == 0
    assert capsys.readouterr().out == f"{prompt}\n"
    with pytest.raises(UsageError, match="'world' is one argument too many: quote text that has spaces"):
        command.parse("outpace", ["--json", "Hello", "world"])()
    assert (tmp_path / "Hello").read_text() == "precious"


def test_json_alone_prints_and_with_a_file_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    for arguments, printed, written in (
        (["--json"], True, False),
        (["--json", str(out)], False, True),
        ([f"--json={out}"], False, True),
        ([], False, False),
    ):
        out.unlink(missing_ok=True)
        assert app.parse(["cache", *arguments])() == 0
        text = capsys.readouterr().out
        assert text.startswith("{") == printed
        assert out.exists() == written
        assert not written or json.loads(out.read_text())["freed"] is None
    assert callable(app.parse(["generate", "--json", "Explain config.json to me."]))  # which is a prompt
    with pytest.raises(ParameterError, match="cannot be written"):
        app.parse(["cache", "--json", str(tmp_path / "no" / "out.json")])


@pytest.mark.parametrize(
    ("extension", "said"),
    [
        ("types.ModuleType('outpace._native')", "the native extension is of interface 1, this Python needs"),
        ("None", "the C++ extension of outpace does not load ("),
    ],
)
def test_the_command_line_tells_it_in_one_line_with_the_remedy(extension: str, said: str) -> None:
    code = f"import sys, types; sys.modules['outpace._native'] = {extension}\n"
    found = subprocess.run(
        [sys.executable, "-c", code + "from outpace.__main__ import main; main()"], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert found.stderr.startswith(f"outpace: {said}")
    assert found.stderr.endswith(f"with a C++17 compiler: {install('outpace[serve]')}\n")
    assert found.stderr.count("\n") == 1


def test_colours_take_no_place_where_a_line_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "columns", lambda: 40)
    screen: Any = SimpleNamespace(isatty=lambda: True)
    green, cyan = "\x1b[32mgreen: drafted by suffix\x1b[0m;", "\x1b[36mcyan: drafted"
    assert terminal.folded(f"{green} {cyan} by eagle:demo\x1b[0m", screen) == f"{green} {cyan}\nby eagle:demo\x1b[0m"
