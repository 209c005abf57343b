"""The command that errors name for a missing package is one that works where it is printed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from outpace.common import installing

SERVE = ("outpace[serve]",)


PIP, UV = "{python} -m pip install", "uv pip install --python {python}"


@pytest.mark.parametrize(
    ("made_by", "tools", "own", "other"),
    [
        ("", ("pip",), f"{PIP} 'outpace[serve]'", f"{PIP} --no-deps a"),
        ("", ("uv",), f"{UV} 'outpace[serve]'", f"{UV} --no-deps a"),
        ("", (), f"{{python}} -m ensurepip && {PIP} 'outpace[serve]'", f"{{python}} -m ensurepip && {PIP} --no-deps a"),
        ("uv-receipt.toml", ("uv",), "uv tool install --force 'outpace[serve]'", f"{UV} --no-deps a"),
        (
            "pipx_metadata.json",
            ("pip",),
            "pipx install --force 'outpace[serve]'",
            "pipx runpip outpace install --no-deps a",
        ),
    ],
)
def test_an_installed_package(
    made_by: str, tools: tuple[str, ...], own: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if made_by:
        (tmp_path / made_by).touch()
    monkeypatch.setattr(installing, "_SOURCE", tmp_path / "lib")
    monkeypatch.setattr(installing, "find_spec", lambda name: name if name in tools else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert installing.install(*SERVE) == own.format(python=sys.executable)
    assert installing.install("a", no_deps=True) == other.format(python=sys.executable)


def test_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup").touch()
    monkeypatch.setattr(installing, "_SOURCE", tmp_path)
    monkeypatch.setattr(installing, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert installing.install(*SERVE) == f"{tmp_path}/scripts/setup"
    assert installing.install("a") == "python -m pip install a"
    assert installing.install("outpace[ray]") == f"python -m pip install -e '{tmp_path}[ray]'"  # not the script's
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "other"))
    assert installing.install(*SERVE) == f"python -m pip install -e '{tmp_path}[serve]'"
