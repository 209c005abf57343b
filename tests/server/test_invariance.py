"""The short form of ``python -m benchmarks invariance``: two starts of a real server, and a journal that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import invariance
from benchmarks.__main__ import call


def test_a_server_says_the_same_and_a_journal_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = {invariance.FIRST: "", "drafter ngram": invariance.OUR_STARTS["drafter ngram"]}
    monkeypatch.setattr(invariance, "OUR_STARTS", starts)
    prompts, journal, out = (tmp_path / name for name in ("prompts.jsonl", "journal", "out.json"))
    prompts.write_text('{"turns": ["Count from one to ten."]}\n')
    given = ["--prompts", prompts, "--requests", "8", "--tokens", "4", "--journal", journal, "--json", out]
    arguments = [*map(str, given), "--log", str(tmp_path / "log")]

    def scored() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(out.read_text())["scores"]["outpace"]
        return found

    assert call("invariance", arguments) == 0
    first = scored()
    assert [first[kind] for kind in invariance.KINDS] == [8, 0, 0, 0, 0]
    assert {name: counts["answers"] for name, counts in first["by"]["crowd"].items()} == dict.fromkeys(
        invariance.CROWDS, 2
    )
    monkeypatch.delattr(invariance.servers, "started")  # nothing is left to ask
    assert call("invariance", arguments) == 0
    assert scored() == first
    text = journal.read_text()
    assert '["outpace asked 0", null]' in text
    journal.write_text(text.replace('["outpace asked 0", null]', '["outpace asked 0", {"failed": "it is gone"}]'))
    assert call("invariance", arguments) == 1
    assert (scored()["failed"], scored()["first"]["failed"]) == (1, "it is gone")
    assert call("invariance", [*arguments, "--requests", "17"]) == 2  # the journal of another run
