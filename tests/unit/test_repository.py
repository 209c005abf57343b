"""What lies in the repository: one version, a changelog that a release can take, no strays."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import outpace

ROOT = Path(__file__).parents[2]


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert "version" not in project
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", outpace.__version__)


def test_the_changelog_has_the_version_and_what_comes_after_it() -> None:
    """# Changelog, then ## VERSION (newest first; what is not released yet above all) with entries of "- " each."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert text.startswith("# Changelog\n\n## ")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    names = [section.partition("\n")[0] for section in sections]
    released = [name.partition(" ")[0] for name in names if name != "Unreleased"]
    numbers = [tuple(map(int, re.findall(r"\d+", name))) for name in released]
    assert names.count("Unreleased") <= 1
    assert "Unreleased" not in names[1:]
    assert numbers == sorted(set(numbers), reverse=True)
    assert released[:1] in ([], [outpace.__version__]) or names[0] == "Unreleased"
    assert released or names == ["Unreleased"]
    for section in sections:
        _, _, body = section.partition("\n")
        lines = [line for line in body.splitlines() if line]
        assert lines, "a version without an entry"
        assert re.match(r"- |### ", lines[0])
        strange = [line for line in lines if not re.match(r"- \S|  \S|### \S", line)]
        assert strange == [], "an entry begins with '- ' and goes on two spaces in"


def test_nothing_is_committed_that_git_ignores() -> None:
    if (ROOT / ".git").exists():
        ignored = ["git", "ls-files", "-ci", "--exclude-standard"]
        assert subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""


def test_what_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`(?:\./)?([\w.]+/[\w./]*)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {f"python{project['project']['requires-python']}", *project["project"]["dependencies"]}
    assert {line.replace(" ", "") for line in recipe["requirements"]["run"]} == needed
    assert {*project["build-system"]["requires"]} <= {line.replace(" ", "") for line in recipe["requirements"]["host"]}


SCRIPT = Path(__file__).parents[2] / "scripts" / "instructions.py"
DUMP = """\
desc: Trigger: Client Request: a
ob=(1) /usr/bin/python3.11
fn=(1) eval
0 100
cob=(2) /x/outpace/_native.abi3.so
cfn=(2) step
calls=3 0
0 5000
+2 7
ob=(2)
fn=(2)
* 4000
cob=(1)
calls=1 0
* 999
totals: 4107
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("instructions", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made_with = {"native": "g++ 1", "rest": "Python 3"}
    kept = {"why": "so", "made_with": made_with, "counts": {"plain": {"native": 1000, "rest": 100}}}
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(module, "made_with", lambda: dict(made_with))
    monkeypatch.setattr("sys.argv", ["instructions"])
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    return module


def test_a_functions_own_instructions_go_to_its_file(script: ModuleType) -> None:
    python, native = "/usr/bin/python3.11", "/x/outpace/_native.abi3.so"
    assert list(script.costs(DUMP)) == [(python, 100), (python, 7), (native, 4000)]


@pytest.mark.parametrize(("native", "status"), [(900, 0), (1050, 0), (1051, 1)])
def test_five_percent_more_fail(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], native: int, status: int
) -> None:
    monkeypatch.setattr(script, "count", lambda: {"plain": {"native": native, "rest": 100}})
    assert script.main() == status
    assert ("--accept WHY" in capsys.readouterr().err) == bool(status)


def test_what_is_accepted_is_kept_with_its_reason(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "count", lambda: {"plain": {"native": 2000, "rest": 100}})
    monkeypatch.setattr("sys.argv", ["instructions", "--accept", "a new feature"])
    assert script.main() == 0
    kept = json.loads(script.KEPT.read_text())
    assert kept["why"] == "a new feature"
    assert kept["counts"]["plain"]["native"] == 2000
