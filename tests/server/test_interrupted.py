"""Ctrl-C, sent as a terminal does, to the smallest real run of a benchmark: what was measured is in the JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ONE_PART = "--generations 500 --malformed 0 --disconnects 0 --slow 0"


@pytest.mark.parametrize(
    ("command", "file", "sign", "kept"),
    [
        (f"soak {ONE_PART}", "text", "part 1:", lambda found: found["counts"]["generations"] >= 50),
        ("fairness --loads bad_words chats chats chats --chats 1", "text", "load bad_words",
         lambda found: found["loads"][0]["load"] == "bad_words"),
        ("invariance --prompts prompts.jsonl --tokens 4 --journal journal", "journal", "outpace asked 0",
         lambda found: found["scores"]["outpace"]["answers"] > 0 == found["scores"]["outpace"]["failed"]),
        ("peers --prompts prompts.jsonl --engines outpace -d none --max-tokens 2", "out.json", "answers",
         lambda found: found["table"][0]["prompts"] > 0),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_ctrl_c_leaves_what_was_measured(
    command: str, file: str, sign: str, kept: Callable[[Any], bool], tmp_path: Path
) -> None:
    """Processes of the group get the signal, too, as in a terminal; servers are in groups of their own."""
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["Count from one to ten."]}\n' * 400)
    with (tmp_path / "text").open("wb") as text:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks", *command.split(), "--json", "out.json"], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=text, stderr=text, process_group=0,
        )  # fmt: skip
    try:
        while process.poll() is None and not (
            (tmp_path / file).exists() and sign in (tmp_path / file).read_text(encoding="utf-8")
        ):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130, (tmp_path / "text").read_text()
    finally:
        process.kill()
        process.wait()
    found = json.loads((tmp_path / "out.json").read_text())
    assert kept(found), found
    assert found.get("failures", []) == []
