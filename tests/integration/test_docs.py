"""The documentation: its Python runs, its commands exist, its links lead somewhere, its lines are short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import names
from outpace.cli.app import parse
from scripts import tables

ROOT = Path(__file__).parents[2]
HISTORY = {"notebook.md"}  # what was written then stays as it was
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CURRENT = [page for page in PAGES if page.name not in HISTORY]
FENCE = re.compile(r"^(?P<before><!-- not run: .+ -->\n)?```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [m["body"] for m in FENCE.finditer(text) if m["language"] in languages and not m["before"]]


@pytest.mark.parametrize("page", [page for page in CURRENT if blocks(page, "python")], ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In order, as one program."""
    program = "\n".join(blocks(page, "python"))
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def code(page: Path) -> Iterator[str]:
    """Lines of a page's shell, whole: fenced, or indented."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    indented = (line.strip() for line in FENCE.sub("", text).splitlines() if line.startswith("    "))
    yield from indented
    for body in blocks(page, "", "bash", "console", "sh"):
        yield from body.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    """``outpace`` parses them, ``python -m benchmarks`` has such a benchmark, scripts are files."""
    for line in code(page):
        words = line.removeprefix("$ ").split(" #")[0].split(" && ")[0]
        if words.startswith(("outpace ", "./scripts/", "python -m benchmarks")) and "..." not in words:
            program, *rest = shlex.split(words)
            if program == "outpace":
                assert callable(parse(rest)), line
            elif program == "python":
                assert rest[2] in names(), line
            else:
                assert (ROOT / program).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"(https?|mailto):", target) and not target.startswith("#"):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    """A line of a table or a link is as long as it must be."""
    long = [
        number
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and not line.startswith(("|", "![", "[")) and " " in line.strip()
    ]
    assert not long, f"{page.name}: lines {long} are longer than 120 characters"


def test_tables_in_docs_are_the_codes() -> None:
    assert not tables.stale(), "run python scripts/tables.py"


def test_a_table_is_made_between_its_marks() -> None:
    page = tables.filled("a\n<!-- table: parameters -->\nold\n<!-- end -->\nb\n")
    assert page.startswith("a\n<!-- table: parameters -->\n| parameter |")
    assert page.endswith("|\n<!-- end -->\nb\n")
    assert "old" not in page
    assert "| `top_n_sigma` | `0.0` | 0 to 100 | filter |" in page
