"""``benchmarks.replays`` on a server: what was said is said again, each altered token is caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import replays, servers
from benchmarks.invariance import Journal, questions
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Remote
from tests.server.serving import Running

COUNT = 4


def test_answers_are_replayed_and_altered_ones_caught(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    @contextmanager
    def started(command: str, log: Path) -> Iterator[Any]:
        commands.append(command)
        yield SimpleNamespace(remote=Remote(demo.url, timeout=120))

    def replayed(journal: Journal) -> dict[str, Any]:
        return replays.replayed("serve", known, COUNT, journal, Path("unused"))

    monkeypatch.setattr(servers, "started", started)
    monkeypatch.setattr(replays, "ALTERED", 2)
    known = questions([PromptRow(str(i), "all", (f"Count from {i} on.",)) for i in range(2)], 8)
    journal = Journal(None, {})
    found = replayed(journal)
    assert commands == ["serve", f"serve {replays.AGAIN}"]
    assert found["wrong"] == []
    assert [found[name] for name in ("replayed", "identical", "altered", "caught")] == [COUNT, COUNT, 2, 2]
    assert replayed(journal) == found
    assert len(commands) == 2, "what is known was asked again"

    forged = Journal(None, {})  # answers that were never given
    for i in range(COUNT):
        forged.add(f"made {i}", replays.alter(journal[f"made {i}"], 0.0, 1)[0])
    found = replayed(forged)
    assert found["identical"] == 0
    assert len([each for each in found["wrong"] if not each["altered"]]) == COUNT
    demo.at_rest(30)
