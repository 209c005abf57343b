"""The score of ``benchmarks.invariance``: 0 for a server that keeps its word, each change of one that does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import servers
from benchmarks.invariance import __main__ as command
from benchmarks.invariance.ask import Contender, outcome, outcomes, preemptions, run
from benchmarks.invariance.journal import Journal
from benchmarks.invariance.plan import CROWDS, HIT, MISS, NOISES, OPENAI, OTHERS, OURS, Item, planned, questions
from benchmarks.invariance.replays import alter
from benchmarks.invariance.report import score
from outpace.errors import ParameterError
from outpace.measure.prompts import PromptRow
from outpace.measure.remote import Answer, Remote, RemoteError
from tests.fake_hub import plain, serving
from tests.unit.test_verify_url import WORDS, Scripted

KNOWN = questions([PromptRow(str(i), "all", (f"Say {i}",)) for i in range(3)], 8)
REQUESTS = 64


def silent(line: str) -> None:
    pass


class Ran:
    """A scripted server, asked; ``commands``: what was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Scripted) -> None:
        self.server, self.commands = server, list[str]()

        @contextmanager
        def started(command: str, log: Path) -> Iterator[Any]:
            self.commands.append(command)
            with serving(server.answer) as url:
                yield SimpleNamespace(remote=Remote(url, timeout=20))

        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(servers, "started", started)

    def score(self, its: Contender, journal: Journal) -> dict[str, Any]:
        items = planned(its.dialect, len(KNOWN), REQUESTS)
        run(its, KNOWN, items, journal, Path("unused"), silent)
        done, found = outcomes(its, items, journal)
        assert done == items
        return score(done, KNOWN, found)


def test_a_plan_gives_each_way_its_share() -> None:
    items = planned(OURS, 40, 1600)
    assert [item.number for item in items] == list(range(1600))
    for axis, values in {
        "start": OURS.starts, "crowd": CROWDS, "stream": (0, 1), "prefix": OURS.prefix, "speculation": OURS.speculation,
    }.items():  # fmt: skip
        counts = Counter(item.ways[axis] for item in items if item.start != "drafter none")
        assert len(counts) == len(values) - (axis == "start")
        assert max(counts.values()) - min(counts.values()) <= 0.1 * max(counts.values()), counts
    assert {item.speculation for item in items if item.start == "drafter none"} == {"as it likes"}
    asked = Counter(item.question for item in items)
    assert set(asked.values()) == {40}
    pairs = {(item.question, item.stream, item.prefix, item.speculation) for item in items}
    assert len(pairs) > 0.8 * 40 * 2 * 2 * 5, "questions and ways go in step"
    starts = [item.start for item in items]
    assert sorted(starts, key=list(OURS.starts).index) == starts, "a server is started more than once"
    assert planned(OURS, 40, 1600) == items
    few = Counter(item.question % len(NOISES) for item in planned(OURS, 40, 80))
    assert set(few.values()) == {20}, "some noise has less than its share"
    with pytest.raises(ParameterError, match="out of range"):
        planned(OURS, 40, 0)


def test_questions_differ_in_noise_and_length() -> None:
    rows = [PromptRow(str(i), "all", (f"Say {i}",)) for i in range(9)]
    asked = questions(rows, 16)
    assert len(asked) == len(rows) * len(NOISES)
    assert {its.body["max_tokens"] for its in asked} == set(range(8, 17))
    assert sum("response_format" in its.body for its in asked) == len(rows)


def test_fields_say_what_an_item_is() -> None:
    def item(number: int, prefix: str, speculation: str) -> Item:
        return Item(number, 0, "first start", CROWDS[0], "whole", prefix, speculation)

    assert OURS.fields(item(3, MISS, "off")) == {"reuse_prefix": False, "speculation": {"off": True}}
    assert OURS.fields(item(3, HIT, "as it likes")) == {}
    assert OTHERS["vllm"].fields(item(3, MISS, "as it likes")) == {"cache_salt": "3"}


def test_a_server_that_keeps_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(monkeypatch, Scripted())
    with Journal(None, {}, silent) as journal:
        found = ran.score(Contender("outpace", "serve", OURS), journal)
        assert journal["outpace preempted little memory"] == 0
    assert (found["answers"], found["changed"], found["bits"], found["failed"]) == (REQUESTS, 0, 0, 0)
    assert found["first"] is None
    assert "serve --drafter none" in ran.commands
    assert len(ran.commands) == len(OURS.starts)


def test_changes_are_counted_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In streams a word, when others are there a bit of logprobs, once nothing at all."""

    def change(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        if len(server.bodies) == 30:
            return {"status": 500}
        if body.get("stream") and body["max_tokens"] < 100 and body["seed"] == 1001:
            return {"words": [*WORDS[:2], " red"]}
        return {"logprob": -0.25} if body["seed"] == 1000 and len(server.bodies) > 20 else None

    server = Scripted(change)
    with Journal(None, {}, silent) as journal:
        found = Ran(monkeypatch, server).score(Contender("theirs", "serve", OPENAI), journal)
    streams, noises = found["by"]["stream"], found["by"]["noise"]
    assert found["changed"] == streams["streamed"]["changed"] == noises["temperature 0.8, top_p"]["changed"] > 0
    assert streams["whole"]["changed"] == 0
    assert found["bits"] == noises["greedy"]["bits"] > 0
    assert found["first"]["index"] == 2
    assert found["first"]["stream"] == "streamed"
    assert found["failed"] <= 1
    assert sum(its["answers"] for its in found["by"]["crowd"].values()) == REQUESTS
    assert set(found["by"]["start"]) == {"first start", "started again"}


def test_what_fails_is_counted_and_the_rest_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        return {"status": 500} if body.get("stream") and body["max_tokens"] < 100 else None

    with Journal(None, {}, silent) as journal:
        found = Ran(monkeypatch, Scripted(change)).score(Contender("theirs", "serve", OPENAI), journal)
    assert found["failed"] == found["by"]["stream"]["streamed"]["failed"] == REQUESTS // 2
    assert found["first"]["failed"].endswith("refuses (HTTP 500)")


def test_another_server_than_before_and_one_that_is_gone_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (item, *_) = planned(OURS, len(KNOWN), REQUESTS)
    body, expected = {**KNOWN[0].body, "model": "m"}, Answer("", "stop", None, fingerprint="of before")
    with serving(Scripted().answer) as url:
        with pytest.raises(RemoteError, match="said by of before"):
            outcome(Contender("outpace", "serve", OURS), Remote(url), body, item, expected)
        assert outcome(Contender("theirs", "serve", OPENAI), Remote(url), body, item, expected)
    with pytest.raises(RemoteError, match="cannot be reached"):
        outcome(Contender("theirs", "serve", OPENAI), Remote(url), body, item, expected)


def test_a_run_that_was_cut_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, its = tmp_path / "journal", Contender("theirs", "serve", OPENAI)
    said: list[str] = []
    whole = Ran(monkeypatch, Scripted())
    with Journal(path, {"of": 1}, said.append) as journal:
        expected = whole.score(its, journal)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:24]) + lines[24][:5])
    again = Ran(monkeypatch, Scripted())
    with Journal(path, {"of": 1}, said.append) as journal:
        assert again.score(its, journal) == expected
    assert "cut short" in said[0]
    kept = {tuple(json.loads(line)[0].rpartition(" ")[::2]) for line in lines[1:24]}
    asked = [number for what, number in kept if what.endswith("asked")]
    assert 0 < len(asked) < 23
    assert path.read_bytes().count(b"\n") == len(lines)
    with pytest.raises(ParameterError, match="is of a run with other"):
        Journal(path, {"of": 2}, silent)
    path.write_text("nonsense\n")
    with pytest.raises(ParameterError, match="no journal"):
        Journal(path, {"of": 1}, silent)


def test_servers_side_by_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        return {"words": WORDS[:1]} if body["seed"] == 1001 and len(server.bodies) > 400 else None

    server = Scripted(change)
    ran = Ran(monkeypatch, server)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say"}\n{"prompt": "' + "long " * 90 + '"}\n')
    given = [
        f"--prompts={prompts}", "--requests=64", "--tokens=8", f"--journal={tmp_path / 'j'}",
        "--server=llamacpp=theirs {port}", "--also=llamacpp:drafted=drafted {port}", f"--json={tmp_path / 'out'}",
    ]  # fmt: skip

    def wrong(*more: str) -> int:
        return command.main([*given, *more])

    assert wrong("--report") == 0
    assert not ran.commands
    code = wrong()
    assert ran.commands[-3:] == ["theirs {port}", "theirs {port}", "drafted {port}"]
    told = capsys.readouterr().out
    assert "outpace: 0 of 64" in told
    assert "started again" in told
    assert "drafted" in told
    scores = json.loads((tmp_path / "out").read_text())["scores"]
    assert code == int(scores["llamacpp"]["changed"] > 0)
    assert all("long" not in json.dumps(body) for body in server.bodies)
    for more, message in [
        (["--server=x=no port"], "no NAME=COMMAND"),
        (["--also=other:x=a {port}"], "no NAME:WHAT=COMMAND"),
        (["--longest=1"], "no prompt of at most 1 characters"),
    ]:
        assert wrong(*more) == 2
        assert message in capsys.readouterr().err


def test_preemptions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'# HELP outpace_preemptions_total Rows\noutpace_preemptions_total{model="demo"} 3.0\nother_total 9.0\n'
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(lambda request: plain(request, 200, text)) as url:
        assert preemptions(Remote(url)) == 3


@pytest.mark.parametrize("ids", [[7], [7, 8, 9], [1000], []])
def test_altered_is_another_token_in_one_place(ids: Sequence[int]) -> None:
    for where in (0.0, 0.5, 0.999):
        answer = {"choices": [{"token_ids": list(ids)}]}
        altered, at = alter(answer, where, 8)
        now = altered["choices"][0]["token_ids"]
        assert answer["choices"][0]["token_ids"] == list(ids)
        assert now != list(ids)
        assert now[at] >= 0
        assert [i for i, (a, b) in enumerate(zip(ids, now, strict=False)) if a != b] == ([at] if ids else [])


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="does not answer"), servers.started("false {port}", tmp_path / "log"):
        raise AssertionError("it started")
