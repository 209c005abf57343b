"""Replays of ``benchmarks.invariance`` on a server: what was said is said again, each altered token is caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import servers
from benchmarks.invariance.journal import Journal
from benchmarks.invariance.plan import questions
from benchmarks.invariance.replays import AGAIN, Replays, alter
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Remote
from tests.server.serving import Running

COUNT, ALTERED = 4, 2


def silent(line: str) -> None:
    pass


def test_answers_are_replayed_and_altered_ones_caught(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    @contextmanager
    def started(command: str, log: Path) -> Iterator[Any]:
        commands.append(command)
        yield SimpleNamespace(remote=Remote(demo.url, timeout=120))

    monkeypatch.setattr(servers, "started", started)
    known = questions([PromptRow(str(i), "all", (f"Count from {i} on.",)) for i in range(2)], 8)
    with Journal(None, {}, silent) as journal:
        replays = Replays(known, COUNT, ALTERED, journal)
        assert replays.score()["replayed"] == 0
        replays.run("serve", Path("unused"), silent)
        assert commands == ["serve", f"serve {AGAIN}"]
        said = replays.score()
        assert said["wrong"] == []
        assert (said["replayed"], said["identical"]) == (COUNT, COUNT)
        assert (said["altered"], said["caught"]) == (ALTERED, ALTERED)
        replays.run("serve", Path("unused"), silent)
        assert len(commands) == 2, "what is known was asked again"
        made = {f"made {i}": journal[f"made {i}"] for i in range(COUNT)}

    with Journal(None, {}, silent) as journal:  # answers that were never given: the score says so
        for key, answer in made.items():
            journal.add(key, alter(answer, 0.0, 1)[0])
        replays = Replays(known, COUNT, ALTERED, journal)
        replays.run("serve", Path("unused"), silent)
        said = replays.score()
        assert said["identical"] == 0
        assert len([its for its in said["wrong"] if not its["altered"]]) == COUNT
        assert said["caught"] < ALTERED
    demo.at_rest(30)
