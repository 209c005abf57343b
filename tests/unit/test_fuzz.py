"""Files that once broke a reader, and a short run of fresh mutations; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.child import KEPT, _too_long, attempt, peak
from tests.fuzz.mutations import Edit, applied
from tests.fuzz.targets import TARGETS, Target


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    before = signal.signal(signal.SIGPROF, _too_long)
    with np.errstate(all="ignore"):
        yield
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read(name: str, tmp_path: Path) -> None:
    for seed, files in TARGETS[name].seeds().items():
        ends = "refused" if seed == "values" and name != "gguf" else "read"  # a header, and no model
        assert attempt(TARGETS[name], files, tmp_path / "input") == (ends, None), seed


@pytest.mark.parametrize("case", json.loads(KEPT.read_text(encoding="utf-8")), ids=lambda case: case["was"][:40])
def test_kept(case: dict[str, Any], tmp_path: Path) -> None:
    target = TARGETS[case["target"]]
    files = applied(target.seeds()[case["seed"]], [Edit(*edit) for edit in case["edits"]])
    assert attempt(target, files, tmp_path / "input")[1] is None


def test_mutations() -> None:
    outcome = fuzz(list(TARGETS), 2000, seed=0)
    assert outcome.faults == []
    assert outcome.read + outcome.refused == 2000
    assert min(outcome.read, outcome.refused) > 100


def test_faults_are_seen(tmp_path: Path) -> None:
    """What is looked for is found: other errors, a panic that is no Exception, no end, too much memory."""

    class Panic(BaseException):
        pass

    def panic(folder: Path) -> None:
        raise Panic

    def wrong(folder: Path) -> None:
        raise KeyError("x")

    def endless(folder: Path) -> None:
        while True:
            pass

    def greedy(folder: Path) -> None:
        np.ones(peak() + (600 << 20), np.uint8)  # more than this process ever had

    said = [
        attempt(Target(dict, read, 1), {"a": b""}, tmp_path / "input")[1] for read in (panic, wrong, endless, greedy)
    ]
    for fault, expected in zip(said, ("Panic", "KeyError: 'x'", "more than 2 seconds", "MiB"), strict=True):
        assert expected in (fault or "")
