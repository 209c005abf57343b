"""Benchmarks: they are listed, and what they count is counted rightly on scripted servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import invariance, servers, serving, streams
from benchmarks.invariance import AXES, NOISES, OUR_AXES, OUR_STARTS, STARTS, Contender, Journal, planned, questions
from benchmarks.peers import report
from outpace.errors import ParameterError
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Remote, RemoteError
from tests import fake_hub
from tests.unit.test_compare_servers import WORDS, Scripted

OURS = Contender("outpace", "serve", OUR_STARTS, OUR_AXES, ours=True)
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


def test_a_plan_gives_each_way_its_share() -> None:
    items = planned(OURS, 40, 1600)
    for axis in ("start", "crowd", "stream", "prefix"):
        counts = Counter(item.ways[axis] for item in items)
        assert max(counts.values()) - min(counts.values()) <= 0.1 * max(counts.values()), counts
    assert {its.ways["speculation"] for its in items if its.ways["start"] == "drafter none"} == {"as it likes"}
    assert set(Counter(item.question for item in items).values()) == {40}
    assert planned(OURS, 40, 1600) == items
    assert next(i for i in planned(THEIRS, 4, 64) if i.ways["prefix"] != invariance.WARM).fields(THEIRS).keys() == {
        "cache_salt"
    }
    with pytest.raises(ParameterError, match="out of range"):
        planned(OURS, 40, 0)


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
        invariance.run(its, KNOWN, items, journal, Path("unused"))
        return invariance.score(its, items, KNOWN, journal)

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return score, commands


def test_a_server_that_keeps_its_word(asked: Any) -> None:
    score, commands = asked
    found = score(Scripted(), OURS, Journal(None, {}))
    assert [found[kind] for kind in invariance.KINDS] == [64, 0, 0, 0, 0]
    assert found["first"] is None
    assert found["preemptions"] == dict.fromkeys(OUR_STARTS, 0)
    assert len(commands) == len(OUR_STARTS)


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


def test_figures_of_streams() -> None:
    shots = [streams.Shot(0.0, (1.0, 1.5, 3.0), 6, "abc"), streams.Shot(1.0, (2.0, 4.0), 2, "de")]
    found = streams.figures([*shots, streams.Shot(2.0, (), 0, "")])
    assert (found["seconds"], found["tokens_per_second"], found["requests_per_second"]) == (4.0, 2.0, 0.75)
    assert found["tpot_p50"] == pytest.approx(1.2)  # of 2 / 5 and 2 / 1
    assert found["icl_p50"] == 1.5  # of 0.5, 1.5 and 2
    for lines in ([], [(0.0, b"{}")], [(0.0, b'{"error": "x"}'), (1.0, b"[DONE]")]):
        with pytest.raises(RemoteError):
            streams.parsed(0.0, lines)


def test_a_round_of_two_servers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET":
            return fake_hub.plain(request, 200, b'{"data": [{"id": "m"}]}')
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        words = body["messages"][0]["content"].split()[: body["max_tokens"]]
        events = [{"choices": [{"delta": {"content": f"{word} "}, "token_ids": [1]}]} for word in words]
        events += [{"choices": [], "usage": {"completion_tokens": len(words)}}]
        data = [*(json.dumps(event).encode() for event in events), b"[DONE]"]
        return fake_hub.plain(request, 200, b"".join(b"data: " + each + b"\n\n" for each in data))

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    process: Any = SimpleNamespace(pid=1)
    monkeypatch.setattr(serving, "spent", lambda pid: servers.Spent(1.0, 0.5))
    with fake_hub.serving(answer) as one, fake_hub.serving(answer) as other:
        running = [
            serving.opened(name, servers.Started(Remote(url), process))
            for name, url in (("outpace", one), (serving.PLAIN, other))
        ]
        for server in running:
            server.crowd(["one two three", "four five", "six"] * 4, 2, 3)
    found = serving.report(running)
    row = found["outpace"]["concurrency"]["3"]
    assert (row["requests"], row["tokens"], len(row["ratios"])) == (12, 20, 1)
    assert serving.same_answers(*running) == (0, 12)
    serving.show({"machine": {"model": "x", "cores": 2}, "tokens": 3, "servers": found, "failed": {"y": "no"}})
    assert "y: LEFT OUT: no" in capsys.readouterr().out


def test_peers_are_pooled_and_changes_counted_against_the_same_engine() -> None:
    def rows(config: str, rests: list[float], texts: list[str], first_tokens: int = 1) -> list[report.Row]:
        same = {"config": config, "tokens": 11, "first_tokens": first_tokens, "first": 0.5}
        pairs = zip(rests, texts, strict=True)
        return [{**same, "prompt": str(i), "rest": rest, "text": text} for i, (rest, text) in enumerate(pairs)]

    answers = [
        *rows("openvino paged", [0.5, 0.5], ["c", "d"]),
        *rows("openvino lookup-5", [0.2, 0.6], ["c", "x"]),
        *rows("outpace ngram", [0.1, 0.3], ["e", "f"], first_tokens=3),
    ]
    plain_of = {"openvino lookup-5": "openvino paged", "outpace ngram": "outpace none"}
    found = {row["config"]: row for row in report.table(answers, plain_of)}
    assert found["openvino lookup-5"]["decode_tokens_per_second"] == pytest.approx(20 / 0.8)
    assert (found["openvino lookup-5"]["changed"], found["outpace ngram"]["changed"]) == (1, None)
    assert found["outpace ngram"]["of_best_peer"] == pytest.approx(16 / 0.4 / 25)
