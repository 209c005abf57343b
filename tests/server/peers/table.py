"""The table of another server's tests: which run here, and why others do not."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

RUNS = ("runs", "words")  # the second: the words that their model says, and counts of its tokens, are not compared
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Table:
    """``files``: folders and files of tests below ``folder`` of the source package; ``conftests``: the folder whose
    conftest.py is the first that counts; ``reasons``: why a test does not
    run, by the word that stands for it; ``short``: what the short form runs; ``tests``: by file, a word for each
    function, or for one of its ids alone."""

    package: str
    version: str
    folder: str
    files: list[str]
    conftests: str
    reasons: dict[str, str]
    short: list[str]
    tests: dict[str, dict[str, str]]

    def word(self, file: str, name: str) -> str:
        """What stands for a test: its name, or ``name[id]``."""
        found = self.tests.get(file, {})
        return found.get(name) or found.get(name.partition("[")[0], "")


def read(name: str) -> Table:
    """Raises OSError where there is no such table."""
    return Table(**tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8")))


def functions(folder: Path, files: list[str]) -> dict[str, list[str]]:
    """The test functions in ``files`` below ``folder``, by file; those of a class as ``Class::name``."""
    paths = [
        path for each in files for path in ([folder / each] if each.endswith(".py") else (folder / each).rglob("*"))
    ]
    found = {}
    for path in sorted(path for path in paths if path.name.startswith("test_") and path.suffix == ".py"):
        names = list(_names(ast.parse(path.read_text(encoding="utf-8")).body))
        if names:
            found[path.relative_to(folder).as_posix()] = names
    return found


def _names(body: list[ast.stmt], owner: str = "") -> list[str]:
    found = list[str]()
    for each in body:
        if isinstance(each, ast.ClassDef) and each.name.startswith("Test"):
            found += _names(each.body, f"{each.name}::")
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test"):
            found.append(owner + each.name)
    return list(dict.fromkeys(found))


def differences(table: Table, folder: Path) -> list[str]:
    """What the table lacks, has too much or spells wrong."""
    theirs = {(file, name) for file, names in functions(folder, table.files).items() for name in names}
    ours = {(file, name.partition("[")[0]) for file, words in table.tests.items() for name in words}
    wrong = [f"{file}::{name} is not in the table" for file, name in sorted(theirs - ours)]
    wrong += [f"{file}::{name} is in the table alone" for file, name in sorted(ours - theirs)]
    known = {*table.reasons, *RUNS}
    for file, words in table.tests.items():
        wrong += [f"{file}::{name}: {word!r} is no reason" for name, word in words.items() if word not in known]
    return wrong
