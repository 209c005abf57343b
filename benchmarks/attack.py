"""A server among good, bad, slow and dying clients: no 5xx, no leak, and /health all the while.

Every client does at random what a soak's do (benchmarks/soak.py) or what an attacker would: connections that say
nothing or half of a request, bodies in crumbs or of the worst JSON, long texts, hostile grammars, names and origins of
others, every route with good and with wrong fields, prompts whose KV goes to the disk and comes from there; one runs
schemathesis, over single operations and over sequences of them. /health is asked 20 times a second from a process of
its own; how late the server's event loop was, and why, its metrics say. After each tenth, when nothing runs, the
engine's invariants are checked and what the server holds is counted. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks import soak
from benchmarks.figures import Measuring, add_json, emit
from benchmarks.servers import started

HEALTH = 0.25  # seconds that /health may take
_REFUSED = {503}  # a limit of connections
_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_WORST = (b"1", b"[]", b"{}", b'"a"', b'{"role":"user","content":"a"}', b'"a":0')
GRAMMARS = (
    {"type": "regex", "value": "(a|b|c){1,800}(x|y){1,900}"},
    {"type": "regex", "value": "(.*a){12}.{200}"},
    {"type": "lark", "value": 'start: e\ne: e e e | e e | "a"'},
    {
        "type": "lark",
        "value": "start: a0\n" + "".join(f'a{i}: "a" a{i + 1} | "b"\n' for i in range(1900)) + 'a1900: "x"',
    },
    {"type": "lark", "value": "start: A\nA: " + "".join(f"/[a-z]{{0,{i}}}/ & " for i in range(1, 900)) + "/[a-z]/"},
)


class Attack(soak.Soak):
    """``statuses``: of all answers to attacks."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(port, seed)
        self.statuses: Counter[int] = Counter()

    def go_on(self, seconds: float, clients: int) -> None:
        """Let so many clients do at random what they can."""
        self._end = time.monotonic() + seconds
        kinds = ("generations", "malformed", "disconnects", "slow", "silent", "half", "crumbs", "worst", "prepared",
                 "strange", "pipelined", "routes", "prefixes")  # fmt: skip

        def client(seed: int) -> None:
            dice = random.Random(seed)
            while time.monotonic() < self._end:
                self._one(dice.choice(kinds), dice.getrandbits(32))

        threads = [threading.Thread(target=client, args=(self._random.getrandbits(32),)) for _ in range(clients)]
        threads.append(threading.Thread(target=self._documented))
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._end = 0.0  # of Ctrl-C
            for thread in threads:
                thread.join()

    def silent(self, dice: random.Random) -> str | None:
        """Connections that say nothing."""
        held = [self._connected() for _ in range(dice.randrange(1, 30))]
        time.sleep(dice.random())
        for connection in held:
            connection.close()
        return None

    def half(self, dice: random.Random) -> str | None:
        """Half of a request, perhaps the other half later."""
        data = json.dumps(soak.tiny(dice.randrange(soak.DIFFERENT))).encode()
        whole = f"{_HEAD}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        cut = dice.randrange(len(whole))
        with self._connected() as connection:
            connection.sendall(whole[:cut])
            time.sleep(dice.random())
            if dice.random() < 0.5:
                return None
            connection.sendall(whole[cut:])
            return self._looked_at(connection.recv(4096))

    def crumbs(self, dice: random.Random) -> str | None:
        """A body in pieces of a byte, until the server cuts it off."""
        with self._connected() as connection:
            try:
                connection.sendall(f"{_HEAD}transfer-encoding: chunked\r\n\r\n".encode())
                for _ in range(dice.randrange(1, 2000)):
                    connection.sendall(b"1\r\n \r\n" * 50)
            except OSError:
                return None
        return None

    def worst(self, dice: random.Random) -> str | None:
        """Up to 8 MiB of JSON that costs far more than its bytes."""
        item = dice.choice(_WORST)
        inner = b",".join([item] * (dice.choice((1000, 100_000, 8_000_000)) // (len(item) + 1)))
        name = dice.choice((b"messages", b"tools", b"stop", b"bad_words", b"logit_bias"))
        inner = b"{%s}" % inner if item.endswith(b":0") else b"[%s]" % inner
        return self._answered(*soak.ask(self.port, b'{"%s":%s}' % (name, inner)))

    def prepared(self, dice: random.Random) -> str | None:
        """What is long to prepare: texts, bad words, grammars."""
        body = soak.tiny(dice.randrange(soak.DIFFERENT))
        more: Mapping[str, Any] = dice.choice(
            (
                {"grammar": dice.choice(GRAMMARS)},
                {"bad_words": [f"word{i}" for i in range(1024)]},
                {"messages": [{"role": "user", "content": "word " * dice.choice((100, 10_000, 1_000_000))}]},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _deep(2000)}}},
                {"stop": ["x" * 1024] * 64},
            )
        )
        return self._answered(*soak.ask(self.port, {**body, **more}))

    def routes(self, dice: random.Random) -> str | None:
        """Any route, as its clients ask, or with a field that is wrong; of a stream perhaps a little is read."""
        which, stream = dice.randrange(soak.DIFFERENT), dice.random() < 0.5
        path, body = dice.choice(list(asked(f"Count from {which} on.", which, stream).items()))
        if body and dice.random() < 0.3:
            body[dice.choice(list(body))] = dice.choice((None, [], {}, -1, "x", 1e999, [[]], "\ud800"))
        return self._posted(path, body, dice.choice((0, 100, 1000)) if stream and dice.random() < 0.3 else None)

    def prefixes(self, dice: random.Random) -> str | None:
        """A long prompt, of which others share a beginning, with its progress; perhaps nobody waits for its end."""
        words = [f"word{dice.randrange(3)}" for _ in range(2)] + ["and so on"] * dice.choice((20, 80, 150))
        path = dice.choice(("/completion", "/v1/messages", "/v1/responses", "/v1/chat/completions"))
        body = {**(asked(" ".join(words), 7, stream=True)[path] or {}), "return_progress": True}
        return self._posted(path, body, 0 if dice.random() < 0.2 else None)

    def _posted(self, path: str, body: Mapping[str, Any] | None, most: int | None = None) -> str | None:
        """Ask, and read the answer, or ``most`` bytes of it. No body: GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return self._answered(response.status, response.read(most))
        finally:
            connection.close()

    def strange(self, dice: random.Random) -> str | None:
        """Names of others, odd methods and paths."""
        headers: dict[str, str] = dice.choice(
            ({"host": "evil.example"}, {"origin": "https://evil.example"}, {"x": "y" * 9000}, {})
        )
        method = dice.choice(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"))
        path = dice.choice(("/", "/health", "/v1/models/..%2f..", "/page/%00", "/v1/traces/x", "/metrics", "/nothing"))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return self._answered(response.status, response.read())
        finally:
            connection.close()

    def pipelined(self, dice: random.Random) -> str | None:
        """Many requests at once, of which few answers are read."""
        with self._connected() as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * dice.randrange(1, 200))
            return self._looked_at(connection.recv(dice.randrange(1, 4096)))

    def _documented(self) -> None:
        """Schemathesis, over and over."""
        import schemathesis
        from hypothesis import HealthCheck, given, seed, settings

        document = schemathesis.openapi.from_url(f"http://127.0.0.1:{self.port}/openapi.json", timeout=120)
        operations: list[Any] = [found.ok() for found in document.get_all_operations() if hasattr(found, "ok")]
        while time.monotonic() < self._end:
            operation = self._random.choice(operations)
            mode = self._random.choice(list(schemathesis.GenerationMode))

            @seed(self._random.getrandbits(32))
            @settings(max_examples=5, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                if time.monotonic() < self._end:
                    response = case.call(timeout=120)
                    wrong = self._answered(response.status_code, response.content)
                    if wrong is not None:
                        self.failures.append(f"{case.operation.label}: {wrong}")

            self._run("documented", check)

    def sequences(self, examples: int) -> None:
        """Schemathesis in its stateful mode: sequences of operations that use each other's answers."""
        import schemathesis
        from hypothesis import HealthCheck, settings

        document = schemathesis.openapi.from_url(f"http://127.0.0.1:{self.port}/openapi.json", timeout=120)
        rules = settings(
            max_examples=examples, stateful_step_count=8, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        self._run("sequences", lambda: document.as_state_machine().run(settings=rules))

    def _run(self, kind: str, check: Callable[[], Any]) -> None:
        from hypothesis.errors import Unsatisfiable

        try:
            with suppress(Unsatisfiable):  # an operation with nothing that could be wrong
                check()
        except Exception as error:
            self.failures.append(f"{kind}: {error!r}"[:2000])
        self.counts[kind] += 1

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def _looked_at(self, begun: bytes) -> str | None:
        status = begun[9:12]
        return self._answered(int(status), begun) if status.isdigit() else None

    def _answered(self, status: int, content: bytes) -> str | None:
        self.statuses[status] += 1
        return f"HTTP {status}: {content[:300]!r}" if status >= 500 and status not in _REFUSED else None


def asked(text: str, seed: int, stream: bool) -> dict[str, dict[str, Any] | None]:
    """A good body of every route that has one; None of those that are only read."""
    messages, shared = [{"role": "user", "content": text}], {"seed": seed, "stream": stream}
    tool = {"name": "now", "description": "the time", "input_schema": {"type": "object", "properties": {}}}
    return {
        "/v1/messages": {"model": "demo", "messages": messages, "max_tokens": 4, "tools": [tool], **shared},
        "/v1/messages/count_tokens": {"model": "demo", "messages": messages, "tools": [tool]},
        "/v1/responses": {"input": text, "max_output_tokens": 4, **shared},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4, **shared},
        "/chat/completions": {"messages": messages, "max_tokens": 4, **shared},
        "/v1/completions": {"prompt": text, "suffix": text if seed % 2 else "", "max_tokens": 4, **shared},
        "/completion": {"prompt": text, "n_predict": 4, "n_probs": 2, **shared},
        "/infill": {
            "input_prefix": text, "input_suffix": text, "input_extra": [{"text": text}], "n_predict": 4, **shared,
        },
        "/api/chat": {"model": "demo", "messages": messages, "stream": stream, "options": {"num_predict": 4}},
        "/api/generate": {"model": "demo", "prompt": text, "stream": stream, "options": {"num_predict": 4}},
        "/tokenize": {"content": text, "with_pieces": True},
        "/detokenize": {"tokens": [1, 2, seed]},
        "/apply-template": {"messages": messages},
        **dict.fromkeys(("/slots", "/props", "/v1/models", "/api/tags", "/version", "/metrics")),
    }  # fmt: skip


def _deep(levels: int) -> dict[str, Any]:
    """A schema that refers and refers."""
    inner = {f"{i}": {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(levels)}
    return {"$ref": "#/$defs/0", "$defs": {**inner, f"{levels}": {"type": "null"}}}


def health(port: int) -> float:
    """Seconds that /health takes, over a connection of its own; infinite where it is not answered."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health")
        ok = connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        ok = False
    finally:
        connection.close()
    return time.perf_counter() - begun if ok else float("inf")


def delays(port: int, cause: str) -> dict[str, int]:
    """How often the server's event loop was late by more than 0.05 s and by more than HEALTH, for this cause alone."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    counts = {
        float(sample.labels["le"]): int(sample.value)
        for sample in families["outpace_loop_delay_seconds"].samples
        if sample.name.endswith("_bucket") and sample.labels["cause"] == cause
    }
    return {f"{bound:g} s": counts[float("inf")] - counts[bound] for bound in (0.05, HEALTH)}


def watch(port: int, times: Any, stop: Any) -> None:
    """What ``health`` gives, 20 times a second."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it goes to the benchmark, too
    found = list[float]()
    while not (found and stop.is_set()):
        found.append(health(port))
        time.sleep(0.05)
    times.put(sorted(found))


def attack(seconds: float, clients: int, log: Path, say: Callable[[str], None], seed: int = 0) -> dict[str, Any]:
    """All of it, against a server of its own."""
    with (
        tempfile.TemporaryDirectory() as cache,
        started(f"{sys.executable} -m benchmarks.soak_server {{port}} suffix {cache}", log) as server,
    ):
        port = int(server.remote.url.rpartition(":")[2])
        run, states = Attack(port, seed), list[soak.State]()
        run.warm()
        context = multiprocessing.get_context("spawn")
        times, stop = context.Queue(), context.Event()
        watcher = context.Process(target=watch, args=(port, times, stop), daemon=True)
        watcher.start()
        with Measuring() as measuring:
            for part in range(soak.PARTS):
                run.go_on(seconds / soak.PARTS, clients)
                run.sequences(max(int(seconds / soak.PARTS / 10), 1))
                states.append(soak.at_rest(port))
                say(f"part {part + 1}: {states[-1]}, {len(run.failures)} failures")
        late = {cause: delays(port, cause) for cause in ("loop", "threads", "machine")}
        stop.set()
        health = times.get(timeout=60)
        watcher.join()
    return {
        "counts": dict(run.counts),
        "statuses": dict(sorted(run.statuses.items())),
        "failures": run.failures,
        "states": states,
        "leaks": soak.leaks(states) if states else [],
        "growth": soak.growth([state["memory"] for state in states]) if states else 0.0,
        "interrupted": measuring.stopped is not None,
        "health": {
            "asked": len(health), "median": health[len(health) // 2], "p99": health[len(health) * 99 // 100],
            "max": health[-1],
        },
        "late": late,
    }  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=8, help="at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("attack.log"), help="where the server's log goes")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Attack and report; 1 for a 5xx, a leak, or a slow /health."""
    found = attack(
        60 * given.minutes, given.clients, given.log, lambda line: print(line, file=sys.stderr, flush=True), given.seed
    )
    print(json.dumps({name: value for name, value in found.items() if name != "failures"}, indent=1))
    wrong = [*found["failures"], *found["leaks"]]
    if found["health"]["max"] > HEALTH:
        often = ", ".join(f"{cause} {late[f'{HEALTH:g} s']}" for cause, late in found["late"].items())
        wrong.append(
            f"/health took {found['health']['max']:.3f} s: at most {HEALTH} are allowed. How often the event loop "
            f"was later by one cause alone: {often} (the machine's, which had no core for it, are not the server's)"
        )
    for line in wrong[:20]:
        print(f"FAILED: {line}")
    emit(given, found)
    if found["interrupted"]:
        raise KeyboardInterrupt
    return 1 if wrong else 0
