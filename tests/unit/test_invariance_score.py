"""The score of ``benchmarks/invariance.py``: 0 for a server that keeps its word, each change of one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import invariance
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Remote, RemoteError
from tests.fake_hub import serving
from tests.unit.test_verify_url import WORDS, Scripted

ROWS = [PromptRow(str(i), "all", (f"Say {i}",)) for i in range(2)]


def score(monkeypatch: pytest.MonkeyPatch, server: Scripted, ours: bool) -> tuple[dict[str, Any], list[str]]:
    commands: list[str] = []

    @contextmanager
    def started(command: str, log: Path) -> Iterator[Remote]:
        commands.append(command)
        with serving(server.answer) as url:
            yield Remote(url)

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(invariance, "server", started)
    return invariance.run("serve", ours, ROWS, 8, Path("unused"), lambda line: None), commands


def test_a_server_that_keeps_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    found, commands = score(monkeypatch, Scripted(), ours=True)
    assert (found["changed"], found["bits"]) == (0, 0)
    assert found["answers"] == len(invariance.VARIANTS) * len(ROWS) * len(invariance.NOISES)
    assert "serve --drafter none" in commands
    assert len(commands) == len({variant.command for variant in invariance.VARIANTS})


def test_one_that_speaks_otherwise_in_streams_and_in_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        if body.get("stream") and body["seed"] == 1001:
            return {"words": [*WORDS[:2], " red"]}
        return {"logprob": -0.25} if body["temperature"] == 0 and len(server.bodies) > 6 else None

    server = Scripted(change, speculates=False)
    found, _ = score(monkeypatch, server, ours=False)
    asked = [its["variant"] for its in found["variants"]]
    assert asked == [variant.name for variant in invariance.VARIANTS if not variant.ours]
    streamed = [its for its in found["variants"] if its["variant"].startswith("streamed")]
    assert [its["changed"] for its in streamed] == [2, 2]
    assert streamed[0]["first"]["index"] == 2
    assert found["changed"] == 4
    assert all(its["bits"] == 2 for its in found["variants"])


def test_what_is_not_taken_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = score(monkeypatch, Scripted(speculates=False), ours=True)
    skipped = {its["variant"] for its in found["variants"] if "skipped" in its}
    assert skipped == {variant.name for variant in invariance.VARIANTS if variant.more}


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="does not answer"), invariance.server("false {port}", tmp_path / "log"):
        raise AssertionError("it started")
