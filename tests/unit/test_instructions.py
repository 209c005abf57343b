"""scripts/instructions.py: what it reads of callgrind's dumps, and its verdict."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

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
