"""How long one API key's chat of one token takes beside a flood of another's, and rows beside a long prompt.

    python -m benchmarks fairness                    # every load, in turn, each between times of the chat alone
    python -m benchmarks fairness --loads --gaps 3000 --model FILE -d none -d model:demo

Two keys ask one ``outpace serve``. The chat beside a load may take three times what it takes alone, and one step: the
time between two tokens of a stream of the flood. Of each the 90th percentile counts. The flood is a process of its own,
so its connections close when it ends.

``--gaps N``: an engine with the server's ``prefill_delay`` and ``step_stretch``, in which four rows decode, gets a
prompt of N tokens; of each round the longest time between two tokens of a row counts until the prompt has its first
one. It may be twice ``prefill_delay``. Drafters take turns round by round, and every round has another prompt.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.attack import GRAMMARS
from benchmarks.figures import Measuring, add_json, at_least_one, emit
from benchmarks.servers import OURS, started
from outpace import Engine, SamplingParams
from outpace.engine.intake import load_engines

KEYS = ("key-of-the-flood", "key-of-the-other")
TIMES = 3  # what the chat may take beside a load, over what it takes alone, before a step is added
SETTLES = 2.0  # seconds until a load is there
_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "ignore_eos": True}
_LONG = {**_CHAT, "max_tokens": 2000, "stream": True, "priority": 2**31 - 1}
_WORDS = "words that no request had before, number {} and "


def _body(load: str, number: int) -> tuple[str, dict[str, Any]]:
    """A request of the flood, unlike those before."""
    chat, text = "/v1/chat/completions", _WORDS.format(number)
    match load:
        case "chats":
            return chat, _LONG
        case "prompts":
            return chat, {**_CHAT, "messages": [{"role": "user", "content": (text * 400)[:6000]}]}
        case "texts":
            return "/tokenize", {"prompt": (text * 10_000)[:390_000]}
        case "grammars":
            return chat, {**_CHAT, "grammar": GRAMMARS[number % len(GRAMMARS)]}
    return chat, {**_CHAT, "bad_words": [f"{text}{i}" * 3 for i in range(1024)]}


LOADS = {"chats": 40, "prompts": 16, "texts": 12, "grammars": 12, "bad_words": 12}  # requests at once


def asked(port: int, key: str, path: str, body: dict[str, Any]) -> Generator[bytes]:
    """The answer, as it comes. Raises OSError and HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK and key == KEYS[1]:
            raise http.client.HTTPException(f"HTTP {response.status}: {response.read()[:300]!r}")
        while piece := response.read1():
            yield piece
    finally:
        connection.close()


def flood(port: int, load: str) -> None:
    """Ask without end. With the lowest priority of the processor: those who flood a server sit at other machines."""
    os.nice(19)

    def one(first: int) -> None:
        number = first
        while True:
            number += 1000
            with suppress(OSError, http.client.HTTPException):
                for _ in asked(port, KEYS[0], *_body(load, number)):
                    pass

    threads = [threading.Thread(target=one, args=(number,)) for number in range(LOADS[load])]
    for each in threads:
        each.start()


@contextmanager
def flooded(port: int, load: str) -> Iterator[list[float]]:
    """Beside a load and a stream of its key, which is there first; the list has seconds between the stream's tokens."""
    gaps, there, over = list[float](), threading.Event(), threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                last = 0.0
                with closing(asked(port, KEYS[0], "/v1/chat/completions", _LONG)) as pieces:
                    for piece in pieces:
                        if last and b"data: {" in piece:
                            gaps.append(time.perf_counter() - last)
                        last = time.perf_counter()
                        there.set()
                        if over.is_set():
                            break
        finally:
            there.set()

    process = multiprocessing.get_context("spawn").Process(target=flood, args=(port, load), daemon=True)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(read)
        try:
            if not there.wait(120):
                raise TimeoutError("the flood's stream did not begin within 120 s")
            if not stream.done():
                process.start()
                time.sleep(SETTLES)
                yield gaps
        finally:
            over.set()
            if process.pid is not None:
                process.kill()
                process.join()
        stream.result()


def timed(port: int, count: int) -> list[float]:
    """Seconds of so many chats of one token, one after the other."""
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        for _ in asked(port, KEYS[1], "/v1/chat/completions", _CHAT):
            pass
        found.append(time.perf_counter() - begun)
        time.sleep(0.05)
    return found


def measured(port: int, load: str, count: int) -> dict[str, Any]:
    """The chat alone, and beside ``load``."""
    timed(port, 3)
    alone = timed(port, count)
    with flooded(port, load) as gaps:
        beside = timed(port, count)
    time.sleep(SETTLES)
    usual, step, found = high(alone), high(gaps), high(beside)
    bound = TIMES * usual + step
    return {
        "load": load, "alone": usual, "beside": found, "median": statistics.median(beside), "worst": max(beside),
        "step": step, "bound": bound, "kept": found <= bound,
    }  # fmt: skip


def high(times: Sequence[float]) -> float:
    """Of ten, nine are no longer."""
    return sorted(times)[len(times) * 9 // 10] if times else 0.0


ROWS, SETTLED, DELAY, STRETCH = 4, 40, 0.05, 2.0  # rows that decode; tokens that they have before the prompt comes
GAP = 2.0  # what a row may wait between two tokens, in prefill delays


def beside(engine: Engine, number: int, length: int) -> dict[str, Any]:
    """A round: seconds between two tokens of rows that decode, alone (the median) and beside a prompt."""
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    rows = [engine.add(f"Write story {number + i}, a long one.", params) for i in range(ROWS)]
    last, tokens = dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0)
    gaps: tuple[list[float], list[float]] = [], []
    long: int | None = None
    while long is None or long in last:
        if long is None and min(tokens.values()) >= SETTLED:
            text = _WORDS.format(number) * length
            long = engine.add(engine.encode(text)[:length], params.with_(max_tokens=200), reuse_prefix=False)
            last[long] = 0.0
        for delta in engine.step():
            now = time.perf_counter()
            if delta.request == long:
                del last[long]
                break
            if tokens[delta.request] >= SETTLED // 2:
                gaps[long is not None].append(now - last[delta.request])
            last[delta.request] = now
            tokens[delta.request] += len(delta.token_ids)
    for request in (*rows, long):
        engine.cancel(request)
    while not engine.idle:
        engine.step()
    return {"usual": statistics.median(gaps[0]), "longest": max(gaps[1]), "steps": len(gaps[1]) // ROWS}


def take_turns(given: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Rounds of ``beside`` by drafter, as they come."""
    names = given.drafter or ["none", "auto"]
    options = {"prefill_delay": DELAY, "step_stretch": STRETCH, "prefix_rows": 0, "threads": given.threads}
    engines = load_engines(Engine, given.model, names, options)
    try:
        for number in range(given.rounds):
            for name, engine in list(zip(names, engines, strict=True))[:: -1 if number % 2 else 1]:
                rounds.setdefault(name, []).append(beside(engine, ROWS * number, given.gaps))
    finally:
        for engine in engines:
            engine.close()


def summed_up(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What a drafter's rounds come to; prints it."""
    found = {}
    for name, each in rounds.items():
        waits = sorted(one["longest"] for one in each)
        usual, longest = statistics.median(one["usual"] for one in each), statistics.median(waits)
        found[name] = {
            "rounds": each, "usual": usual, "longest": longest, "delay": DELAY, "over_delay": longest / DELAY,
            "kept": longest <= GAP * DELAY,
        }  # fmt: skip
        times = " to ".join(f"{1000 * wait:.1f}" for wait in (waits[0], waits[-1]))
        print(
            f"{name}: usually {1000 * usual:.1f} ms, beside the prompt at most {1000 * longest:.1f} ({times}): "
            f"{longest / DELAY:.2f} x prefill_delay, {longest / (usual + DELAY):.2f} x it and a usual step"
        )
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loads", nargs="*", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--gaps", type=at_least_one, metavar="TOKENS", help="rows beside a prompt of so many, too")
    parser.add_argument("--model", "-m", default="demo", help="of --gaps")
    parser.add_argument("--drafter", "-d", action="append", help="of --gaps; repeatable (none, then auto)")
    parser.add_argument("--rounds", type=at_least_one, default=6, help="of --gaps")
    parser.add_argument("--threads", type=int, help="of --gaps")
    parser.add_argument("--chats", type=int, default=30, help="timed alone, and beside each load")
    parser.add_argument("--log", type=Path, default=Path("fairness.log"), help="where the server's log goes")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """1 where the chat beside a load, or a gap, is above its bound."""
    found = list[dict[str, Any]]()
    rounds: dict[str, list[dict[str, Any]]] = {}
    with Measuring() as turns:
        if given.gaps is not None:
            take_turns(given, rounds)
    between = summed_up(rounds)
    if not given.loads or turns.stopped:
        emit(given, {"gaps": between})
        return turns.end(0 if all(each["kept"] for each in between.values()) else 1)
    with (
        started(f"env OUTPACE_API_KEYS={','.join(KEYS)} {OURS}", given.log, KEYS[1]) as server,
        Measuring() as measuring,
    ):
        port = int(server.remote.url.rpartition(":")[2])
        for load in given.loads:
            found.append(measured(port, load, given.chats))
            print("  ".join(f"{name} {1000 * value:.1f} ms" if name in _TIMES else f"{name} {value}"
                            for name, value in found[-1].items()), flush=True)  # fmt: skip
            emit(given, {"loads": found, "gaps": between}, partial=True)
    emit(given, {"loads": found, "gaps": between})
    for each in found:
        if not each["kept"]:
            print(f"FAILED: beside {each['load']} the chat took {each['beside']:.3f} s", file=sys.stderr)
    return measuring.end(0 if all(each["kept"] for each in [*found, *between.values()]) else 1)


_TIMES = ("alone", "beside", "median", "worst", "step", "bound")
