"""The soak's short form; ``scripts/soak`` is the long one. Memory needs the long one: here it only warms up."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from outpace.server.api.chat import ChatRequest
from outpace.server.errors import APIError
from outpace.server.schema import parsed

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="what a process holds is read in /proc")


def test_everything_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    counts = {"generations": 40, "malformed": 40, "disconnects": 5, "slow": 1}
    found = soak.soak(counts, 12, "ngram", tmp_path / "log", lambda line: None, warm=False)
    assert found["failures"] == []
    assert found["counts"] == counts
    assert [state for state in found["states"] if state["busy"] or state["inside"] or state["samples"]] == []
    assert {its for its in found["leaks"] if not its.startswith("memory")} == set()
    assert sum(found["stopped"].values()) == 24
    assert found["stopped"].get("answered", 0) >= 1
    assert found["again"] > 0  # how long it took is for the long form to judge


def test_what_the_soak_calls_nonsense_is_varied() -> None:
    """Most of it is no request at all; the rest (a model, a format) has to be refused by the server, by name."""
    refused = 0
    for seed in range(300):
        try:
            parsed(ChatRequest, soak.nonsense(random.Random(seed)))
        except APIError:
            refused += 1
    assert 200 < refused < 300


def test_leaks_are_seen() -> None:
    state = {"memory": 1000, "files": 9, "threads": 6}
    assert soak.leaks([state, state, state]) == []
    assert soak.leaks([state, {**state, "memory": 1050}]) == []
    for name, value in (("memory", 1051), ("files", 12), ("threads", 7)):
        (told,) = soak.leaks([state, state, {**state, name: value}])
        assert told.startswith(f"{name} grew from")


def test_a_changed_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak believes nobody: an answer that differs from that of before, a 500, a stream that is cut short."""
    asked = itertools.count()

    def ask(port: int, body: Mapping[str, Any]) -> tuple[int, bytes]:
        number = next(asked)
        if number == 50:
            return 500, b"oh"
        said = {"content": str(int(number == 40))}
        if not body["stream"]:
            return 200, json.dumps({"choices": [{"message": said}]}).encode()
        events = [json.dumps({"choices": [{"delta": said}]}), *["[DONE]"] * (number < 55)]
        return 200, "".join(f"data: {event}\n\n" for event in events).encode()

    monkeypatch.setattr(soak, "ask", ask)
    monkeypatch.setattr(soak, "DIFFERENT", 1)
    run = soak.Soak(0)
    run.run({"generations": 62}, 1)
    wrong = "\n".join(run.failures)
    assert "question 0 had the answer '0', and now '1'" in wrong
    assert "HTTP 500" in wrong
    assert "[DONE]" in wrong
