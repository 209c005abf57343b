"""The documentation: its Python runs, its commands exist, its links lead somewhere, its lines are short."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import parse as benchmark
from outpace import Engine
from outpace.cli.app import parse
from scripts import tables, tour
from tests.server.foreign import results_of
from tests.server.serving import serving

ROOT = Path(__file__).parents[2]
HISTORY = {"notebook.md"}  # what was written then stays as it was
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CURRENT = [page for page in PAGES if page.name not in HISTORY]
FILE = re.compile(r"[\w./-]+\.(jsonl?|txt|gguf|trace|html|csv|svg|toml|ya?ml|py)")
OWN = re.compile(r"(\./)?(model|prompts|other|[A-Z]+)\.\w+")  # a reader's, or a name to fill in
WRITTEN = {"-o", "--out", "--json", "--trace", "--plot", "--journal", "--data", "--chart", "--html"}
BESIDE = "<!-- run beside a server -->\n"
FENCE = re.compile(
    r"^(?P<before><!-- (?:not run: .+|run beside a server) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$",
    re.M | re.S,
)


def blocks(page: Path, *languages: str, before: str | None = None) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [m["body"] for m in FENCE.finditer(text) if m["language"] in languages and m["before"] == before]


@pytest.mark.parametrize(
    "page",
    [page for page in (*CURRENT, tour.PAGE) if page == tour.PAGE or blocks(page, "python")],
    ids=lambda p: p.name,
)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In order, as one program."""
    program = "\n".join(tour.sources(page) if page == tour.PAGE else blocks(page, "python"))
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("package", ["openai", "anthropic", "ollama"])
def test_python_beside_a_server_runs(package: str, tmp_path: Path) -> None:
    """Each client's snippets in order, as one program; only the port is another."""
    address, clients, programs = "http://127.0.0.1:8000", ("openai", "anthropic", "ollama"), dict[str, str]()
    for body in blocks(ROOT / "docs" / "serving.md", "python", before=BESIDE):
        name = next((name for name in clients if f"import {name}" in body), clients[0])
        programs[name] = programs.get(name, "") + body
    with serving(Engine.load("demo", drafter="suffix+eagle:demo", max_length=1024)) as running:
        program = programs[package].replace(address, running.url)
        assert results_of("agents", package, f"{program}\nfound = True", running.url, tmp_path)


def test_a_notebooks_cells_show_what_jupyter_shows() -> None:
    names: dict[str, Any] = {}
    assert tour.outputs("x = 2\nprint('a')\nprint('b')", names, 1) == [
        {"output_type": "stream", "name": "stdout", "text": ["a\n", "b\n"]}
    ]
    (shown,) = tour.outputs("x + 1", names, 2)
    assert (shown["execution_count"], shown["data"]) == (2, {"text/plain": ["3"]})
    assert tour.outputs("None", names, 3) == []
    page = json.loads(tour.PAGE.read_text(encoding="utf-8"))
    ran = [cell for cell in page["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    assert any("text/html" in output.get("data", {}) for cell in ran for output in cell["outputs"])


def code(page: Path) -> Iterator[str]:
    """Lines of a page's shell, whole: fenced, or indented."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    indented = (line.strip() for line in FENCE.sub("", text).splitlines() if line.startswith("    "))
    yield from indented
    for body in blocks(page, "", "bash", "console", "sh"):
        yield from body.replace("\\\n", " ").splitlines()


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours on a page, those behind another's pipe, too."""
    for line in code(page):
        plain = re.sub(r"\s#\s.*", "", line.strip().removeprefix("$ "))
        for part in re.split(r" && | \| | & ?$", plain):
            words = re.sub(r"^(\w+=\S* )+", "", part.split(" < ")[0])
            if words.startswith(("outpace ", "./scripts/", "python -m benchmarks")) and "..." not in words:
                yield shlex.split(words)


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    """Their own parsers take them, scripts are files, and where a checkout is needed the page says so. A file that is
    named is in the checkout, or the page's text or an earlier command names it."""
    known = re.sub(r"^    .*", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.M)
    for program, *rest in commands(page):
        if program == "outpace":
            assert callable(parse(rest)), rest
        elif program == "python":
            benchmark(rest[2], rest[3:])
        else:
            assert (ROOT / program).exists(), program
        if program != "outpace":
            assert re.search("checkout|of the repository", known), f"{page.name}: {program} {rest} needs a checkout"
        for before, word in pairwise(["", *rest]):
            if FILE.fullmatch(word) and not OWN.fullmatch(word) and before not in WRITTEN:
                assert word in known or (ROOT / word).exists(), f"{page.name}: where does {word} come from?"
            known += f" {word}"


@pytest.mark.parametrize("name", ["traces.md", "learn.md"])
def test_the_commands_of_a_page_run_as_pasted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in an empty folder; what records or races for long is parsed alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    ran = [words for words in commands(ROOT / "docs" / name) if not {"--record", "race"} & set(words)]
    assert ran
    for _, *words in ran:
        assert parse(words)() == 0, words


def test_the_readmes_commands_run_as_pasted_in_an_empty_folder(tmp_path: Path) -> None:
    """Those that answer; the others name no file that is not there (what they do is tested elsewhere)."""
    (use,) = [body for body in blocks(ROOT / "README.md", "bash") if "outpace generate" in body]
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for line in use.splitlines():
        if "outpace generate" in line:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=tmp_path,
                env=os.environ | path,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, done.stderr
            assert len(done.stdout) > 10
        else:
            assert not re.search(r"\s[\w/]+\.\w+(\s|$)", line.split("#")[0]), f"{line} names a file"


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's titles, as GitHub and the site name them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"(https?|mailto):", target):
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


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
