"""Layout: no import runs to a higher floor, there are no circles, and no file is longer than one idea."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outpace"
FLOORS = (  # from the ground up; ARCHITECTURE: an import never runs upwards
    ("errors",), ("common",), ("params",), ("exact",), ("models", "text"), ("drafters",), ("control",), ("engine",),
    ("measure", "training"), ("cli", "integrations", "server", "__main__"),
)  # fmt: skip
LONGEST = 800  # lines


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """What a file imports of the package, anywhere in it: at its top, in a function, for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and (node.module + ".").startswith("outpace."):
            home = node.module.removeprefix("outpace").lstrip(".")
            for alias in node.names:
                inner = f"{home}.{alias.name}".lstrip(".")
                found.add(inner if inner in known else home)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("outpace.") for alias in node.names if alias.name.startswith("outpace.")}
    return {name for name in found if name in known and name}


def floor_of(module: str) -> int:
    top = module.split(".")[0]
    return next(i for i, names in enumerate(FLOORS) if top in names)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(path, known) for name, path in known.items() if name not in ("", "_native", "_fast")}


def test_every_module_is_on_a_floor(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 50
    for module in graph:
        floor_of(module)


def test_no_import_runs_upwards(graph: dict[str, set[str]]) -> None:
    upward = [
        f"{module} -> {other}"
        for module, others in graph.items()
        for other in others
        if other in graph and floor_of(other) > floor_of(module)
    ]
    assert not upward, upward


def test_no_circles(graph: dict[str, set[str]]) -> None:
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for other in graph.get(module, ()):
            if other != module:
                visit(other, [*path, module])
        done.add(module)

    for module in graph:
        visit(module, [])


def test_long_files_say_why() -> None:
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "native").rglob("*.cpp"), *(ROOT / "native").rglob("*.h")]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LONGEST:
            assert "long because" in text[:2000].lower(), f"{path.relative_to(ROOT)}: split it, or say why it is long"
