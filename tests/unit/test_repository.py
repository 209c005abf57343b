"""What lies in the repository: one version, a changelog that a release can take, no strays."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

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
        assert lines[0].startswith("- ")
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
