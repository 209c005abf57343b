"""The soak's short form; ``scripts/soak`` is the long one. Memory needs the long one: here it only warms up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import attack, bodies, fairness, soak
from benchmarks.servers import OURS, started

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


@pytest.mark.parametrize(
    ("memory", "leaks"),
    [
        ([333, 283, 289, 294, 295, 295, 294, 296, 295, 294], False),
        ([200, 290, 296, 300, 301, 301, 302, 301, 302, 302], False),  # what is bounded is being filled
        ([300, 300, 300, 300, 300, 390, 300, 300, 300, 300], False),  # once, and given back
        ([300, 310, 298, 309, 297, 311, 299, 308, 298, 312], False),
        ([300 + 3 * part for part in range(10)], True),  # a leak of one per cent a part
        ([300 + 4 * part + 8 * (part % 2) for part in range(10)], True),  # one in noise
        ([300] * 4 + [300 + 8 * part for part in range(6)], True),  # one that begins late
    ],
)
def test_a_leak_is_told_from_warming_up_and_noise(memory: list[int], leaks: bool) -> None:
    states = [{"memory": each << 20, "files": 9, "threads": 6} for each in memory]
    assert bool(soak.leaks(states)) == leaks


def test_an_attack_breaks_nothing(tmp_path: Path) -> None:
    """The attacker's short form. How long /health takes is for the long one: here others may have the processor."""
    found = attack.attack(10, 4, tmp_path / "log", lambda line: None)
    assert found["failures"] == []
    assert {leak for leak in found["leaks"] if not leak.startswith("memory")} == set()
    assert set(found["counts"]) >= {"worst", "half", "crumbs", "prepared", "documented", "sequences", "routes"}
    assert found["health"]["asked"] > 0


def test_the_worst_json_costs_little(tmp_path: Path) -> None:
    """Of the processor, four times what the benchmark asks for: others may have it here."""
    with started(bodies.SERVER, tmp_path / "log") as server:
        bodies.measured(server, "blanks")
        found = [bodies.measured(server, kind) for kind in bodies.KINDS]
    costly = [each for each in found if each["seconds"] > 4 * bodies.SECONDS or each["memory"] > bodies.MEMORY]
    assert costly == []
    assert {each["status"] for each in found} == {200, 400, 413}


def test_one_keys_flood_is_timed_beside_another_keys_chat(tmp_path: Path) -> None:
    """The short form: the chats get their answers, and the flood's connections close with it. Whether the bound was
    kept is for the long form: here others may have the processor."""
    command = f"env OUTPACE_API_KEYS={','.join(fairness.KEYS)} {OURS}"
    with started(command, tmp_path / "log", fairness.KEYS[1]) as server:
        found = fairness.measured(int(server.remote.url.rpartition(":")[2]), "bad_words", 2)
    assert 0 < found["median"] <= found["beside"] <= found["worst"]
    assert found["bound"] >= 3 * found["alone"] > 0
