"""Benchmarks: they are listed, and Ctrl-C leaves what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import forward, paired, serving
from benchmarks.__main__ import call
from benchmarks.paired import PHASES


def test_benchmarks_are_listed_and_run_by_name() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True)

    listed = run("--help")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines()[2:]]
    assert {"peers", "paired", "forward", "serving", "acceptance", "prove", "soak", "invariance"} <= set(names)
    assert "usage: python -m benchmarks prove" in run("prove", "--help").stdout
    assert "did you mean prove?" in run("porve").stdout


def test_ctrl_c_leaves_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that are complete; a file has them, ``--json`` alone prints them, and text is elsewhere then."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "no" / "out.json"
    prompts.write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n')
    row = {"drafter": "none", "tokens": [1], "steps": 4, "seconds": 1.0, "counted": 3, "by": dict.fromkeys(PHASES, 0.1)}

    def interrupted(source: Path, work: dict[str, Any]) -> list[dict[str, Any]]:
        if next(calls) == 3:  # the second round, whose first version has run
            raise KeyboardInterrupt
        return [{**row, "prompt": i} for i in range(2)]

    monkeypatch.setattr(paired, "_run", interrupted)
    for target in ([str(out)], []):
        calls = iter(range(9))
        assert call("paired", ["a/src", "b/src", "--prompts", str(prompts), "-d", "none", "--json", *target]) == 130
        said = capsys.readouterr()
        found = json.loads(out.read_text() if target else said.out)
        assert [[row["round"] for row in found[name]] for name in ("before", "after")] == [[0, 0], [0, 0]]
        assert "same tokens 2 of 2" in (said.out if target else said.err)
        assert "interrupted: what was measured until then is kept" in said.err


def test_ctrl_c_between_two_servers_leaves_what_both_were_asked() -> None:
    ours, theirs = (SimpleNamespace(rounds=rounds) for rounds in ({1: ["a", "b"], 4: ["c"], 8: []}, {1: ["d"]}))
    serving.paired([ours, theirs])  # type: ignore[list-item]
    assert (ours.rounds, theirs.rounds) == ({1: ["a"]}, {1: ["d"]})


def test_ctrl_c_after_a_round_of_forwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter([1e9, 1e9])  # before the rounds, and after the first

    def bandwidth(threads: int) -> float:
        try:
            return next(reads)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(forward, "bandwidth", bandwidth)
    sizes = ("--contexts", "8", "--rows", "1", "--repeats", "1", "--prefill", "8", "--threads", "1")
    assert call("forward", [*sizes, "--json", str(tmp_path / "out.json")]) == 130
    assert len(json.loads((tmp_path / "out.json").read_text())["cells"]) == len(forward.WIDTHS)
    assert "| context 8 |" in capsys.readouterr().out
