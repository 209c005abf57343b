"""Replicas under Ray Serve are one server: the same answers, whoever writes them, and whoever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks.scale import KINDS, Replicas, broken, busy, request, same, stream

TRIES = 50  # on a busy machine an answer may be whole before its server is found


@pytest.fixture(autouse=True)
def _both_live(ray: Replicas) -> None:
    while len(ray.servers()) < 2:  # Ray starts another for each that a test has ended
        time.sleep(0.1)


def _until(done: Callable[[], bool]) -> bool:
    """Whether it came true, in a minute at most."""
    return any(done() or time.sleep(0.1) for _ in range(600))


def _content(answer: httpx.Response) -> Any:
    return answer.json()["choices"][0]["message"]["content"]


def _lost(ray: Replicas, kind: str, sent: signal.Signals) -> bool:
    """Whether a server got the signal in mid-stream."""
    for number in range(TRIES):
        wanted, _ = stream(ray.url, request(kind, number % 7))
        equal, gap = broken(ray, kind, wanted, number, sent)
        assert equal
        if gap >= 0:
            return True
    return False


def test_answers_are_those_of_one_server(ray: Replicas) -> None:
    url = next(iter(ray.servers().values()))
    for kind in KINDS:
        assert same(stream(ray.url, request(kind))[0], stream(url, request(kind))[0])
    body = request("seeded").body
    paths = (f"{ray.url}/chat/completions", f"{url}/v1/chat/completions")  # the first as base URLs without /v1 give it
    ours, direct = (httpx.post(each, json=body, timeout=300) for each in paths)
    assert ours.json()["choices"] == direct.json()["choices"]
    assert httpx.get(f"{ray.url}/v1/models").json()["data"][0]["id"] == "demo"
    refused = httpx.post(f"{ray.url}/v1/chat/completions", json={**body, "temperature": -1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"


def test_metrics_are_summed(ray: Replicas) -> None:
    def answers(url: str) -> float:
        lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("outpace_answers_total"))

    assert _until(lambda: answers(ray.url) == sum(map(answers, ray.servers().values())) > 0)


def test_a_client_that_leaves_frees_its_row(ray: Replicas) -> None:
    body = {**request("seeded").body, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{ray.url}/v1/chat/completions", json=body, timeout=300) as answer:
        next(answer.iter_lines())
    assert _until(lambda: busy(ray.servers()) is None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_server_is_killed_goes_on_with_the_same_tokens(ray: Replicas, kind: str) -> None:
    assert _lost(ray, kind, signal.SIGKILL)


def test_a_stream_whose_server_is_stopped_goes_on_with_the_same_tokens(ray: Replicas) -> None:
    assert _lost(ray, "seeded", signal.SIGSTOP)


def test_a_whole_answer_whose_server_is_killed_comes_from_another(ray: Replicas) -> None:
    asked = request("seeded", 5)
    wanted, _ = stream(ray.url, asked)
    killed = None
    for _ in range(TRIES):
        servers = ray.servers()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{ray.url}/v1/chat/completions", json=asked.body, timeout=300)
            while killed is None and not answer.done():
                killed = busy(servers)
            if killed is not None:
                os.kill(killed, signal.SIGKILL)
        assert _content(answer.result()) == wanted["choices"][0]["text"]
        if killed is not None:
            break
    assert killed is not None


def test_a_stream_goes_on_when_every_server_that_there_was_is_killed(ray: Replicas) -> None:
    wanted, _ = stream(ray.url, request("seeded", 6))

    def act() -> None:
        for pid in ray.servers():
            os.kill(pid, signal.SIGKILL)

    found, _ = stream(ray.url, request("seeded", 6), 5, act)
    assert same(found, wanted)
