"""The extension's types, which its build writes: a type checker sees every call into C++."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from outpace import _native

STUB = Path(__file__).parents[2] / "src" / "outpace" / "_native.pyi"
RIGHT = """
from outpace import _fast
from outpace.common.arrays import I32
from outpace.exact.drafts import Drafts, Verdicts
from outpace.models.base import Model, Output

def step(model: Model, rows: _fast.native.Rows, tokens: I32) -> Output:
    row = rows.row(
        0, 1, 3, True, "ngram", _fast.native.NgramLookup(1, 4, 8, [0.5], 0.1), ("ngram",), True, True, False, False,
        "coupled", False, {}, None, True, True, False, 99,
    )
    rows.begin(None, [(row, tokens, 3, 4), (row, tokens.data, 3, 4, None, False)], [(row, tokens, 0, 2, True)])
    rows.put([0], Drafts(*rows.drafts(True)))
    rows.decide_all(Verdicts(*rows.verdicts()))
    return model.run(rows)
"""
WRONG = {
    'rows.row(\n        0, 1, 3, True, "ngram"': 'rows.row(\n        0, 1, 3, "ngram"',
    "NgramLookup(1, 4, 8, [0.5], 0.1)": "NgramLookup(1, 4, 8, 0.5, 0.1)",
    "(row, tokens, 3, 4)": "(row, [1, 2, 3], 3, 4)",
    "tokens.data, 3, 4, None, False": "tokens.data, 3, 4, False, None",
    "Drafts(*rows.drafts(True))": "Drafts(*rows.verdicts())[0]",
    "rows.decide_all(": "rows.decide_every(",
    "model.run(rows)": "model.run(row)",
}


def checked(tmp_path: Path, *programs: str) -> dict[str, list[int]]:
    """Lines in which mypy, strict, finds a fault, by file."""
    for i, program in enumerate(programs):
        (tmp_path / f"program{i}.py").write_text(program)
    files = [f"program{i}.py" for i in range(len(programs))]
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nstrict = true\nmypy_path = {STUB.parents[1]}\nfollow_imports = silent\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", "mypy-cache", *files],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    faults = [line.split(":")[:3] for line in done.stdout.splitlines() if ": error:" in line]
    assert done.returncode == (1 if faults else 0), done.stdout + done.stderr
    return {file: [int(line) for at, line, _ in faults if at == file] for file in files}


def test_a_type_checker_sees_calls_into_the_extension(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    programs = [RIGHT, *(RIGHT.replace(right, wrong) for right, wrong in WRONG.items())]
    assert RIGHT not in programs[1:]
    found = checked(tmp_path, *programs)
    assert found.pop("program0.py") == []
    assert [file for file, lines in found.items() if len(lines) != 1] == []


def test_the_types_are_those_of_the_extension_and_say_of_every_value_what_it_is() -> None:
    """Names as the running extension has them; nothing is ``object``, or a list, tuple or dict of who knows what."""
    tree = ast.parse(STUB.read_text())
    named = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert named == {name for name, value in vars(_native).items() if inspect.isclass(value) or callable(value)}
    vague = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for hint in (*(arg.annotation for arg in function.args.args), function.returns):
            parts = [] if hint is None else list(ast.walk(hint))
            full = [part.value for part in parts if isinstance(part, ast.Subscript)]
            full += [part.func for part in parts if isinstance(part, ast.Call)]
            bare = {part.id for part in parts if isinstance(part, ast.Name) and part not in full}
            if bare & {"object", "list", "tuple", "dict", "Sequence", "NDArray"} or (
                parts and "Any" in bare and not full
            ):
                vague.append(f"{function.name}: {ast.unparse(parts[0])}")
    assert vague == []
