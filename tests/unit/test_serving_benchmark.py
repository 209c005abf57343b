"""``benchmarks/serving.py``: its arithmetic by hand, and a round against a scripted server."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load, serving
from benchmarks.load import Shot
from benchmarks.servers import Started
from outpace.measure.remote import Remote, RemoteError
from tests import fake_hub

A = Shot(0.0, (1.0, 1.5, 3.0), (2, 1, 3), 6, "abc")
B = Shot(1.0, (2.0, 4.0), (1, 1), 2, "de")
EMPTY = Shot(2.0, (), (), 0, "")


def chunk(text: str, ids: list[int] | None = None, **more: Any) -> bytes:
    return json.dumps({"choices": [{"delta": {"content": text}, "token_ids": ids}], **more}).encode()


def test_figures() -> None:
    assert A.first == 1.0
    assert A.gaps == [0.5, 1.5]
    assert A.per_token == 0.4  # 2 seconds after the first piece, 5 tokens after the first
    assert math.isnan(EMPTY.per_token)
    found = load.figures([A, B, EMPTY])
    assert (found["seconds"], found["tokens"], found["tokens_per_second"]) == (4.0, 8, 2.0)
    assert found["requests_per_second"] == 0.75
    assert found["first_p50"] == 1.0
    assert found["tpot_p50"] == pytest.approx(1.2)  # of 0.4 and 2
    assert found["icl_p50"] == 1.5  # of 0.5, 1.5, 2


def test_quantiles() -> None:
    assert load.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert load.quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert load.quantile([7.0, math.nan], 1.0) == 7.0
    assert math.isnan(load.quantile([], 0.5))


def test_windows_count_the_tokens_that_came_in_them() -> None:
    assert load.windows([A, B], 1.0, [2.0, 4.0]) == [3.0, 2.0]  # 2 + 1 in one second, 3 + 1 in two; one came too late
    assert load.windows([A], 2.0, [3.0, 3.5]) == [0.0, 6.0]


def test_a_stream_is_parsed_with_the_times_of_its_pieces() -> None:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 4}}).encode()
    lines = [(1.0, chunk("", [])), (2.0, chunk("a", [1, 2])), (3.0, chunk("", [3])), (4.0, chunk("b")), (5.0, usage)]
    shot = load.parsed(0.5, [*lines, (6.0, b"[DONE]")])
    assert shot == Shot(0.5, (2.0, 3.0, 4.0), (2, 1, 1), 4, "ab")
    for wrong, why in (
        (lines, "without \\[DONE\\]"),
        ([], "without \\[DONE\\]"),
        ([(1.0, b'{"error": {"message": "no"}}'), (2.0, b"[DONE]")], "with an error"),
        ([*lines[:4], (6.0, b"[DONE]")], "no usage"),
    ):
        with pytest.raises(RemoteError, match=why):
            load.parsed(0.0, wrong)


class Scripted:
    """Says one word a token; ``ids``: whether it knows ``return_token_ids``. It sees how many ask at once."""

    def __init__(self, ids: bool) -> None:
        self.ids, self.most = ids, 0
        self._inside, self._lock = 0, threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET":
            return fake_hub.plain(request, 200, b'{"data": [{"id": "m"}]}')
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if "return_token_ids" in body and not self.ids:
            return fake_hub.plain(request, 400, b'{"error": {"message": "unknown field"}}')
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        words = body["messages"][0]["content"].split()[: body["max_tokens"]]
        told = [chunk(f"{word} ", [1] if self.ids else None) for word in words]
        told += [json.dumps({"choices": [], "usage": {"completion_tokens": len(words)}}).encode(), b"[DONE]"]
        fake_hub.plain(request, 200, b"".join(b"data: " + its + b"\n\n" for its in told))
        with self._lock:
            self._inside -= 1
        return None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processor time is read in /proc")
def test_a_round_of_two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(serving, "CROWD", 4)  # connections that the scripted server queues
    scripts = Scripted(True), Scripted(False)
    with (
        fake_hub.serving(scripts[0].answer) as one,
        fake_hub.serving(scripts[1].answer) as other,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
    ):
        servers = [
            serving.opened(name, Started(Remote(url), process))
            for name, url in (("outpace", one), (serving.PLAIN, other))
        ]
        assert [its.ids for its in servers] == [True, False]
        for its in servers:
            for _ in range(2):
                its.crowd(["one two three", "four five", "six"] * 4, 2, 3)
            its.ramp(["one two three"], 3, 0.05, 2)
    found = serving.report(servers)
    for name in ("outpace", serving.PLAIN):
        row = found[name]["concurrency"]["3"]
        assert (row["requests"], row["tokens"]) == (24, 40)
        assert row["tokens_per_second"] == pytest.approx(40 / row["seconds"])
        assert len(found[name]["ramp"]["windows"]) == 6
    mine, plain = found["outpace"], found[serving.PLAIN]
    assert len(mine["concurrency"]["3"]["ratios"]) == 2
    assert "ratios" not in plain["concurrency"]["3"]
    assert len(mine["ramp"]["window_ratios"]) == 6
    assert mine["ramp"]["tpot_p99_ratio"] == pytest.approx(mine["ramp"]["tpot_p99"] / plain["ramp"]["tpot_p99"])
    assert serving.same_answers(*servers) == (0, 24)
    changed = servers[0].rounds[3][0]
    changed[0] = Shot(0.0, (1.0,), (1,), 1, "zzz")
    assert serving.same_answers(*servers)[0] >= 1
    serving.show({"machine": {"model": "x", "cores": 2}, "tokens": 3, "servers": found, "failed": {"y": "no"}})
