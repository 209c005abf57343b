"""Replicas on a running Ray: they are replaced, their number follows the load, and an ingress may die."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.scale import KINDS, Asked, Cluster, busy, request, same, stream
from tests.scale.conftest import OPTIONS


def test_an_update_loses_nothing(cluster: Cluster) -> None:
    """Neither short streams nor those that take longer than the old replicas may."""
    cluster.serve("2", *OPTIONS, "--drain", "1")
    asked = {kind: request(kind) for kind in KINDS}
    wanted = {kind: stream(cluster.url, each)[0] for kind, each in asked.items()}
    greedy = request("greedy")
    long = Asked(greedy.path, {**greedy.body, "max_tokens": 900, "ignore_eos": True})
    whole = stream(cluster.url, long)[0]
    with ThreadPoolExecutor(2) as pool:
        update = pool.submit(cluster.serve, "2", *OPTIONS[:-1], "suffix")
        turns = 0

        def longer() -> bool:
            found = []
            while not found or not update.done():
                found.append(same(stream(cluster.url, long)[0], whole))
            return all(found)

        long_ones = pool.submit(longer)
        while not update.done():
            for kind, each in asked.items():
                assert same(stream(cluster.url, each)[0], wanted[kind])
            turns += 1
        update.result()
        assert long_ones.result()
    assert turns
    drafters = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0").count(b"suffix") for pid in cluster.servers()}
    assert 1 in drafters


def test_models_by_name_and_new_weights(cluster: Cluster) -> None:
    """A stream of a model that --also names goes on elsewhere; the update that makes it the first one mixes nothing."""
    cluster.serve("2", *OPTIONS, "--also", "demo-gemma")
    kinds = ("greedy", "seeded", "penalties", "stop")  # as texts: demo-gemma has no template for chats
    asked = {kind: Asked("completions", {**request("texts").body, **KINDS[kind]}) for kind in kinds}
    old = {kind: stream(cluster.url, each)[0] for kind, each in asked.items()}
    named = {kind: Asked(each.path, {**each.body, "model": "demo-gemma"}) for kind, each in asked.items()}
    new = {kind: stream(cluster.url, each)[0] for kind, each in named.items()}
    servers = cluster.servers()

    def act() -> None:
        if (pid := busy(servers)) is not None:
            os.kill(pid, signal.SIGKILL)

    assert same(stream(cluster.url, named["seeded"], 5, act)[0], new["seeded"])
    with ThreadPoolExecutor(2) as pool:
        update = pool.submit(cluster.serve, "2", *OPTIONS, "-m", "demo-gemma", "--served-name", "demo")
        while not update.done():
            for kind, each in asked.items():
                found = stream(cluster.url, each)[0]
                assert same(found, old[kind]) or same(found, new[kind])
        update.result()
    assert all(same(stream(cluster.url, each)[0], new[kind]) for kind, each in asked.items())


def test_a_stream_whose_ingress_is_killed_breaks_and_can_be_resumed(cluster: Cluster) -> None:
    cluster.serve("2", *OPTIONS)
    asked = request("logprobs", 3)
    wanted = stream(cluster.url, asked)[0]["choices"][0]["ids"]
    for _ in range(50):
        ids, whole = _broken(cluster, asked)
        if not whole:
            break
    assert not whole
    assert ids == wanted[: len(ids)]
    rest, _ = stream(cluster.url, Asked(asked.path, {**asked.body, "resume": {"token_ids": ids}}))
    assert ids + rest["choices"][0]["ids"] == wanted


def _broken(cluster: Cluster, asked: Asked) -> tuple[list[int], bool]:
    """The token ids of a stream whose ingress is killed after its first chunks; whether it ended as a whole one."""
    ids: list[int] = []
    whole = False
    try:
        body = {**asked.body, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/{asked.path}", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                whole = whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    if not ids:
                        for pid in cluster.ingress():
                            os.kill(pid, signal.SIGKILL)
                    ids += _ids(json.loads(line[6:]))
    except httpx.HTTPError:
        assert not whole
    while httpx.get(f"{cluster.url}/health", timeout=300).status_code != 200:
        time.sleep(0.1)
    return ids, whole


def _ids(chunk: dict[str, Any]) -> list[int]:
    return [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]


def test_replicas_are_as_many_as_the_load_asks_and_those_that_go_end_their_streams(cluster: Cluster) -> None:
    cluster.serve("1-2", *OPTIONS, "--max-rows", "1", "--drain", "600")
    wanted = [stream(cluster.url, request("greedy", number))[0] for number in range(6)]

    def all_the_same(pool: ThreadPoolExecutor) -> bool:
        asked = [pool.submit(stream, cluster.url, request("greedy", number)) for number in range(6)]
        return all(same(each.result()[0], whole) for each, whole in zip(asked, wanted, strict=True))

    with ThreadPoolExecutor(7) as pool:
        while len(cluster.servers()) < 2:
            assert all_the_same(pool)
        fewer = pool.submit(cluster.serve, "1", *OPTIONS)
        while not fewer.done() or len(cluster.servers()) > 1:
            assert all_the_same(pool)
        fewer.result()
