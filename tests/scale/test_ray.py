"""Replicas under Ray Serve are one server: the same answers, whoever writes them, and whoever dies."""

from __future__ import annotations

import os
import signal
import time

import httpx
import pytest

from benchmarks.scale import KINDS, Replicas, broken, request, same, stream


@pytest.fixture(autouse=True)
def _both_live(ray: Replicas) -> None:
    while len(ray.servers()) < 2:  # Ray starts another for each that a test has ended
        time.sleep(0.1)


def _lost(ray: Replicas, kind: str, sent: signal.Signals) -> bool:
    """Whether a server got the signal in mid-stream. An answer may be whole before its server is found; then this asks
    for another one."""
    for number in range(20):
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
    body = request("seeded")
    ours, direct = (httpx.post(f"{each}/v1/chat/completions", json=body, timeout=60).json() for each in (ray.url, url))
    assert ours["choices"] == direct["choices"]
    assert httpx.get(f"{ray.url}/v1/models").json()["data"][0]["id"] == "demo"
    refused = httpx.post(f"{ray.url}/v1/chat/completions", json={**body, "temperature": -1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temperature"


def test_metrics_are_summed(ray: Replicas) -> None:
    def answers(url: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("outpace_answers_total"))

    assert answers(ray.url) == sum(map(answers, ray.servers().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_whose_server_is_killed_goes_on_with_the_same_tokens(ray: Replicas, kind: str) -> None:
    assert _lost(ray, kind, signal.SIGKILL)


def test_a_stream_whose_server_is_stopped_goes_on_within_seconds(ray: Replicas) -> None:
    assert _lost(ray, "seeded", signal.SIGSTOP)


def test_a_whole_answer_whose_server_is_killed_comes_from_another(ray: Replicas) -> None:
    body = request("seeded", 5)
    wanted, _ = stream(ray.url, body)
    for pid in [*ray.servers()][:1]:
        os.kill(pid, signal.SIGKILL)
    answer = httpx.post(f"{ray.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == wanted["choices"][0]["text"]


def test_a_stream_goes_on_when_every_server_that_there_was_is_killed(ray: Replicas) -> None:
    wanted, _ = stream(ray.url, request("seeded", 6))

    def act() -> None:
        for pid in ray.servers():
            os.kill(pid, signal.SIGKILL)

    found, _ = stream(ray.url, request("seeded", 6), 5, act)
    assert same(found, wanted)
