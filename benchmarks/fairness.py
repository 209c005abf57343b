"""What one key's load costs another: key B's chat of one token, alone and beside what key A can ask for.

A floods from eight connections: generations that never end at the highest priority, long texts to tokenise, grammars
that are long to compile, bodies of 8 MiB that are refused. B's median should be at most three times what it is alone
plus one step. Loads are measured in turn, B alone before and after them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.attack import GRAMMARS
from benchmarks.servers import OURS, started

A, B = "key-of-a", "key-of-b"
STEPS = 3.0
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
LOADS: dict[str, list[tuple[str, bytes]]] = {
    "generations": [
        ("/v1/chat/completions", json.dumps({**_CHAT, "n": 4, "max_tokens": 400, "priority": 2**31 - 1}).encode())
    ],
    "texts": [("/tokenize", json.dumps({"prompt": "word " * 200_000}).encode())],
    "grammars": [
        ("/v1/chat/completions", json.dumps({**_CHAT, "max_tokens": 4, "grammar": grammar}).encode())
        for grammar in GRAMMARS
    ],
    "bodies": [("/v1/chat/completions", b'{"messages":[' + b"[]," * 2_600_000 + b"1]}")],
}


def asked(port: int, path: str, body: bytes, key: str) -> int:
    """The answer's status; 0 where the server let the connection go."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def times_of_b(port: int, seconds: float) -> list[float]:
    """Seconds of B's chats, one after the other."""
    body, found, end = json.dumps({**_CHAT, "max_tokens": 1}).encode(), list[float](), time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        status = asked(port, "/v1/chat/completions", body, B)
        if status != 200:
            raise RuntimeError(f"B's chat was answered by {status}")
        found.append(time.perf_counter() - begun)
        time.sleep(0.02)
    return sorted(found)


def under(port: int, load: list[tuple[str, bytes]], seconds: float) -> list[float]:
    """B's times while A floods."""
    stop = threading.Event()

    def flood(first: int) -> None:
        turns = cycle(load[first % len(load) :] + load[: first % len(load)])
        while not stop.is_set():
            asked(port, *next(turns), A)

    threads = [threading.Thread(target=flood, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        return times_of_b(port, seconds)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def figures(times: list[float], alone: float) -> Mapping[str, float]:
    median = statistics.median(times)
    return {"chats": len(times), "median": median, "p99": times[len(times) * 99 // 100], "of_alone": median / alone}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20, help="of every load")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of the longest step, which B may wait for")


def run(given: argparse.Namespace) -> int:
    """Measure and print JSON; 1 where B waits for too long."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        keys = Path(folder) / "keys"
        keys.write_text(f"{A}\n{B}\n")
        made = stack.enter_context(started(f"{OURS} --api-key-file {keys}", Path(folder) / "log"))
        port = int(made.remote.url.rpartition(":")[2])
        times_of_b(port, 2)
        alone = times_of_b(port, given.seconds / 2)
        loaded = {name: under(port, load, given.seconds) for name, load in LOADS.items()}
        alone = sorted(alone + times_of_b(port, given.seconds / 2))
    base = statistics.median(alone)
    found = {"alone": figures(alone, base), **{name: figures(times, base) for name, times in loaded.items()}}
    print(json.dumps(found, indent=1))
    slow = [name for name, figure in found.items() if figure["median"] > STEPS * base + given.step]
    for name in slow:
        print(f"FAILED: beside {name} B's chat takes {found[name]['median']:.3f} s, alone {base:.3f} s")
    return 1 if slow else 0
