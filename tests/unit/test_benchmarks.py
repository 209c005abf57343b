"""Benchmarks: they are listed, and what they count is counted rightly on scripted servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import forward, invariance, paired, servers, serving
from benchmarks.__main__ import call
from benchmarks.invariance import AXES, NOISES, STARTS, Contender, Journal, planned, questions
from benchmarks.paired import PHASES
from outpace.errors import ParameterError
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Remote, RemoteError
from tests import fake_hub
from tests.unit.test_compare_servers import WORDS, Scripted

THEIRS = Contender("theirs", "serve", STARTS, AXES["vllm"])
KNOWN = questions([PromptRow(str(i), "all", (f"Say {i}",)) for i in range(3)], 8)


def test_benchmarks_are_listed_and_run_by_name() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True)

    listed = run("--help")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines()[2:]]
    assert {"peers", "paired", "forward", "serving", "acceptance", "prove", "soak", "invariance"} <= set(names)
    assert "usage: python -m benchmarks prove" in run("prove", "--help").stdout
    assert "did you mean prove?" in run("porve").stdout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a scripted server's answers score, and the commands that would have started it."""
    commands: list[str] = []

    def score(server: Scripted, its: Contender, journal: Journal) -> dict[str, Any]:
        @contextmanager
        def started(command: str, log: Path) -> Iterator[Any]:
            commands.append(command)
            with fake_hub.serving(server.answer) as url:
                yield SimpleNamespace(remote=Remote(url, timeout=20))

        monkeypatch.setattr(servers, "started", started)
        items = planned(its, len(KNOWN), 64)
        invariance.ask_all(its, KNOWN, items, journal, Path("unused"))
        return invariance.score(its, items, KNOWN, journal)

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return score, commands


def test_changes_are_counted_where_they_are_and_a_run_that_was_cut_goes_on(asked: Any, tmp_path: Path) -> None:
    """In streams a word, elsewhere a bit of logprobs, once nothing at all."""

    def change(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        if len(server.bodies) == 30:
            return {"status": 500}
        if body.get("stream") and body["max_tokens"] < 100 and body["seed"] == 1001:
            return {"words": [*WORDS[:2], " red"]}
        return {"logprob": -0.25} if body["seed"] == 1000 and len(server.bodies) > 20 else None

    score, _ = asked
    server, path = Scripted(change), tmp_path / "journal"
    found = score(server, THEIRS, Journal(path, {"of": 1}))
    by_stream, by_noise = found["by"]["stream"], found["by"]["noise"]
    assert found["changed"] == by_stream["streamed"]["changed"] == by_noise[list(NOISES)[1]]["changed"] > 0
    assert found["bits"] == by_noise["greedy"]["bits"] > 0
    assert (found["first"]["index"], found["first"]["stream"]) == (2, "streamed")
    assert "64 (" in invariance.shown({"theirs": found})
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:5])
    before = len(server.bodies)
    assert score(server, THEIRS, Journal(path, {"of": 1}))["answers"] == 64
    again = [body for body in server.bodies[before:] if body["max_tokens"] < 100]  # those of neighbours are longer
    assert 1 <= len(again) <= 2  # one answer, perhaps with its prefix warmed
    with pytest.raises(ParameterError, match="is of another run"):
        Journal(path, {"of": 2})


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="does not answer"), servers.started("false {port}", tmp_path / "log"):
        raise AssertionError("it started")


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
