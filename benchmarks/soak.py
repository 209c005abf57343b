"""A server under everything at once, for long: tiny generations, nonsense, clients that go away, slow ones.

    scripts/soak                                             # 10,000 generations; with other counts: --help

What comes is mixed from the first request to the last. Every answer is looked at: the same question has the same one
however often and beside whatever it is asked; nonsense is refused by name; slow readers get all of theirs.
Between parts, when nothing runs, the engine's invariants are checked and what is held is counted (rows, blocks,
threads, files, memory). Memory may not grow by 5 % once the first fifth has filled what is bounded: its trend counts,
the median of the slopes between any two parts (Theil and Sen), which neither one part nor noise makes. Free pages are
given back before memory is read, as the server does when it is idle: how many the C library keeps (36 to 63 MB of 330
in one run, up and down) says nothing of leaks. KV that was once in use stays mapped: it is filled before. At last the
server gets a signal to stop under load, where every request has to be answered or refused; and `outpace serve` is
killed (-9) in mid-stream and started again, where the first answer has to be that of before, within 5 s. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import socket
import statistics
import struct
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import Measuring, add_json, emit
from benchmarks.servers import OURS, started

PARTS = 10  # of a soak, between which memory is read
GROWTH = 0.05  # of memory, from after the warm-up to the end
AGAIN = 5.0  # seconds after which a server that was killed has to serve again
REST = 30.0  # seconds in which everything has to have ended
DIFFERENT = 24  # generations that differ
ROWS, LONG = 8, 180  # rows of the server; tokens of an answer, so many of which fill its KV
State = Mapping[str, Any]


class Soak:
    """``failures`` says what went wrong, in words; ``counts`` what was done."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self.port, self._random = port, random.Random(seed)
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._answers: dict[int, str] = {}
        self._lock = threading.Lock()

    def run(self, counts: Mapping[str, int], readers: int) -> None:
        """So many of each kind (a method's name), mixed, by so many readers."""
        kinds = [kind for kind, count in counts.items() for _ in range(count)]
        self._random.shuffle(kinds)
        seeds = [self._random.getrandbits(32) for _ in kinds]
        with ThreadPoolExecutor(readers) as threads:
            list(threads.map(self._one, kinds, seeds))

    def warm(self) -> None:
        """Fill what is bounded: KV for as many long answers at once as there are rows, with their log-probabilities."""
        asks = {"max_tokens": LONG, "stop": None, "logprobs": True, "top_logprobs": 10, "speculation": None}
        with ThreadPoolExecutor(ROWS) as threads:
            for status, body in threads.map(lambda which: ask(self.port, {**tiny(which), **asks}, 900), range(ROWS)):
                if status != http.HTTPStatus.OK:
                    self.failures.append(f"warm-up: HTTP {status}: {body[:200]!r}")

    def _one(self, kind: str, seed: int) -> None:
        act: Callable[[random.Random], str | None] = getattr(self, kind)
        try:
            wrong = act(random.Random(seed))
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            wrong = repr(error)
        with self._lock:
            self.counts[kind] += 1
            if wrong is not None:
                self.failures.append(f"{kind} (seed {seed}): {wrong}")

    def generations(self, dice: random.Random) -> str | None:
        """A tiny one. Its answer is that of before."""
        which = dice.randrange(DIFFERENT)
        stream = dice.random() < 0.5
        status, body = ask(self.port, {**tiny(which), "stream": stream})
        if status != http.HTTPStatus.OK:
            return f"HTTP {status}: {body[:200]!r}"
        text = streamed(body) if stream else str(json.loads(body)["choices"][0]["message"]["content"])
        with self._lock:
            before = self._answers.setdefault(which, text)
        return None if before == text else f"question {which} had the answer {before!r}, and now {text!r}"

    def malformed(self, dice: random.Random) -> str | None:
        """It is refused, in OpenAI's shape."""
        data = nonsense(dice)
        status, body = ask(self.port, data)
        error = json.loads(body)["error"]
        if not 400 <= status < 500 or not error["message"] or not error["type"]:
            return f"{data[:200]!r} got HTTP {status}: {body[:200]!r}"
        return None

    def disconnects(self, dice: random.Random) -> str | None:
        """A stream of which a little is read."""
        with opened(self.port, {**tiny(dice.randrange(DIFFERENT)), "max_tokens": 400, "stream": True}) as connection:
            wanted = dice.choice((0, 1, 300, 2000))
            while wanted > 0 and (piece := connection.recv(wanted)):
                wanted -= len(piece)
            if dice.random() < 0.5:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return None

    def slow(self, dice: random.Random) -> str | None:
        """A stream that is read little by little comes whole."""
        body = {**tiny(dice.randrange(DIFFERENT)), "max_tokens": 48, "stream": True, "logprobs": True}
        received = b""
        with opened(self.port, {**body, "top_logprobs": 10}, buffer=2048) as connection:
            while piece := connection.recv(4096):
                received += piece
                time.sleep(0.02)
        whole = b"data: [DONE]" in received and b'"error"' not in received
        return None if whole else f"it ended so: {received[-200:]!r}"


def tiny(which: int) -> dict[str, Any]:
    """A question; the same one has the same answer."""
    noise = {"temperature": 0} if which % 2 else {"temperature": 0.9, "top_p": 0.9}
    more: tuple[dict[str, Any], ...] = (
        {}, {"frequency_penalty": 0.5}, {"logprobs": True, "top_logprobs": 3}, {"speculation": {"off": True}},
        {"stop": ["e"]}, {"logit_bias": {"30": 5}},
    )  # fmt: skip
    return {
        "messages": [{"role": "user", "content": f"Count from {which} on."}], "seed": which, "ignore_eos": True,
        "max_tokens": 1 + which % 5, **noise, **more[which % len(more)],
    }  # fmt: skip


def nonsense(dice: random.Random) -> bytes:
    """A body that is no request."""
    good = tiny(dice.randrange(DIFFERENT))
    whole = json.dumps(good).encode()
    return dice.choice(
        (
            lambda: whole[: dice.randrange(len(whole))],
            lambda: dice.randbytes(dice.randrange(1, 200)) + b"\xff",
            lambda: json.dumps({**good, dice.choice(("presence_penalti", "min_tokns")): 1}).encode(),
            lambda: json.dumps({**good, "messages": dice.choice((None, "x", [], 7, [{}], [{"role": "x"}]))}).encode(),
            lambda: json.dumps({**good, "max_tokens": dice.choice((-2, "4", 1.5, True, [], 10**30))}).encode(),
            lambda: json.dumps({**good, "temperature": dice.choice((-1, "1", [], 10**400, True))}).encode(),
            lambda: json.dumps({**good, "temperature": float(dice.choice(("nan", "inf", "-inf")))}).encode(),
            lambda: json.dumps({**good, "top_logprobs": dice.choice((-1, 1000, "a")), "logprobs": True}).encode(),
            lambda: json.dumps({**good, "speculation": dice.choice(("x", [], -1, True, {"drafter": "x"}))}).encode(),
            lambda: json.dumps({**good, "response_format": {"type": dice.choice(("xml", 3, None))}}).encode(),
            lambda: json.dumps({**good, "model": dice.choice(("none", "../demo", 7))}).encode(),
            lambda: b"[" * dice.randrange(65, 5000),
            lambda: b'{"messages":' * dice.randrange(2, 2000),
            lambda: json.dumps([good]).encode(),
        )
    )()


def ask(port: int, body: Mapping[str, Any] | bytes, timeout: float = 120.0) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def opened(port: int, body: Mapping[str, Any], buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection over which ``body`` was sent."""
    data = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.settimeout(120)
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(("127.0.0.1", port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def streamed(stream: bytes) -> str:
    """The text of a whole stream. Raises ValueError for one that is not."""
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        raise ValueError(f"a stream ended without [DONE]: {stream[-200:]!r}")
    chunks = [json.loads(event) for event in events[:-1]]
    if failed := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        raise ValueError(f"a stream ended with {failed}")
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def at_rest(port: int) -> State:
    """What the server holds once nothing runs. Raises TimeoutError when something goes on."""
    end = time.monotonic() + REST
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/soak", timeout=REST) as response:
            state: State = json.loads(response.read())
        if not (state["busy"] or state["inside"] or state["samples"]):
            return state
        if time.monotonic() > end:
            raise TimeoutError(f"after {REST:g} s without a request it is not at rest: {state}")
        time.sleep(0.05)


def growth(memory: Sequence[float]) -> float:
    """How much the trend adds to memory, read at equal distances, as a share of it; the first fifth is warm-up.
    Source: Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau" (1968)."""
    warm = memory[len(memory) // 5 :]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(warm), 2)]
    return statistics.median(slopes) * (len(warm) - 1) / statistics.median(warm) if slopes else 0.0


def leaks(states: Sequence[State]) -> list[str]:
    """What grew, each state being one at rest."""
    found, memory = list[str](), [state["memory"] for state in states]
    if growth(memory) > GROWTH:
        found.append(f"memory grew by {growth(memory):.1%}: {memory} bytes")
    last = states[-1]
    for name, spare in (("files", 2), ("threads", 0)):
        most = max(state[name] for state in states[: max(len(states) // 2, 1)])
        if last[name] > most + spare:
            found.append(f"{name} grew from {most} to {last[name]}")
    return found


def stopped_under_load(port: int, process: int, requests: int = 24) -> dict[str, int]:
    """SIGTERM while so many run: how each ended, by kind; "lost" is neither answered nor refused."""
    ends: Counter[str] = Counter()

    def one(number: int) -> str:
        stream = number % 2 == 0
        body = {**tiny(number), "max_tokens": 20 + 10 * (number % 9), "stop": None, "stream": stream}
        try:
            status, answer = ask(port, body)
        except ConnectionRefusedError:
            return "not let in"
        except (OSError, http.client.HTTPException) as error:
            return f"lost: {error!r}"
        if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            return "refused"
        if status != http.HTTPStatus.OK:
            return f"lost: HTTP {status}"
        if b'"shutting_down"' in answer:
            return "ended with an error"
        try:
            streamed(answer) if stream else json.loads(answer)["choices"][0]["finish_reason"]
        except (ValueError, KeyError, IndexError) as error:
            return f"lost: {error!r}"
        return "answered"

    with ThreadPoolExecutor(requests) as threads:
        running = [threads.submit(one, number) for number in range(requests // 2)]
        time.sleep(0.3)
        os.kill(process, signal.SIGTERM)
        running += [threads.submit(one, number) for number in range(requests // 2, requests)]
        for future in running:
            ends[future.result()] += 1
    return dict(ends)


def killed(log: Path) -> tuple[float, str | None]:
    """``outpace serve``, killed while it streams and started again: seconds until it answers, and what is wrong."""

    def answer(port: int) -> Any:
        return json.loads(ask(port, tiny(1))[1])["choices"]

    with started(OURS, log) as server:
        port = int(server.remote.url.rpartition(":")[2])
        before = answer(port)
        with opened(port, {**tiny(0), "max_tokens": 400, "stream": True}) as connection:
            connection.recv(300)
            server.process.kill()
            server.process.wait()
    begun = time.monotonic()
    with started(OURS, log) as server:
        after = answer(int(server.remote.url.rpartition(":")[2]))
        seconds = time.monotonic() - begun
    return seconds, None if before == after else f"killed and started again, it says {after}, not {before}"


def soak(
    counts: Mapping[str, int], readers: int, drafter: str, log: Path, say: Callable[[str], None], warm: bool = True
) -> dict[str, Any]:
    """All of it, with a server of its own. ``warm``: what is bounded is filled before memory is compared."""
    command = f"{sys.executable} -m benchmarks.soak_server {{port}} {drafter}"
    begun = time.monotonic()
    with started(command, log) as server:
        port = int(server.remote.url.rpartition(":")[2])
        run = Soak(port)
        if warm:
            run.warm()
        states: list[State] = []
        found: dict[str, Any] = {}
        lost: list[str] = []
        with Measuring() as measuring:
            for part in range(PARTS):
                run.run({kind: (part + 1) * n // PARTS - part * n // PARTS for kind, n in counts.items()}, readers)
                states.append(at_rest(port))
                say(f"part {part + 1}: {time.monotonic() - begun:.0f} s, {states[-1]}, {len(run.failures)} failures")
            found["stopped"] = stopped_under_load(port, server.pid)
            code = server.process.wait(REST)
            lost += [f"stopped under load, one was {end}" for end in found["stopped"] if end.startswith("lost")]
            lost += [f"it ended with {code}"] if code else []
        counted, lost = dict(run.counts), [*run.failures, *lost]  # before the server ends, which Ctrl-C's last may see
    if measuring.stopped is None:
        with measuring:
            found["again"], other = killed(log)
            lost += [other] if other else []
    return {
        "seconds": time.monotonic() - begun,
        "counts": counted,
        "failures": lost,
        "states": states,
        "leaks": leaks(states) if states else [],
        "interrupted": measuring.stopped is not None,
        **found,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--generations", type=int, default=10_000)
    parser.add_argument("--malformed", type=int, default=1_000)
    parser.add_argument("--disconnects", type=int, default=200)
    parser.add_argument("--slow", type=int, default=50)
    parser.add_argument("--readers", type=int, default=12, help="at once")
    parser.add_argument("--drafter", default="auto")
    add_json(parser)
    parser.add_argument("--log", type=Path, default=Path("soak.log"), help="what the server says")


def run(given: argparse.Namespace) -> int:
    counts = {name: getattr(given, name) for name in ("generations", "malformed", "disconnects", "slow")}
    found = soak(counts, given.readers, given.drafter, given.log, lambda line: print(line, file=sys.stderr, flush=True))
    print(f"{found['counts']} in {found['seconds']:.0f} s")
    if not found["interrupted"]:
        _show(found)
        if found["again"] > AGAIN:
            found["failures"].append(f"that is more than {AGAIN:g} s")
    for wrong in (found["failures"] + found["leaks"])[:20]:
        print(f"FAILED: {wrong}")
    emit(given, found)
    if found["interrupted"]:
        raise KeyboardInterrupt
    return 1 if found["failures"] or found["leaks"] else 0


def _show(found: dict[str, Any]) -> None:
    first, last = found["states"][0], found["states"][-1]
    for name in first:
        print(f"{name:10} after a tenth {first[name]:>12} at the end {last[name]:>12}")
    trend = growth([state["memory"] for state in found["states"]])
    print(f"memory's trend: {trend:+.1%}; stopped under load: {found['stopped']}")
    print(f"killed, it answered again after {found['again']:.1f} s")
