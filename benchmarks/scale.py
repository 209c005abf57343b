"""Replicas under Ray Serve: servers are killed in mid-stream, and every stream goes on with the same tokens.

``--rounds`` streams of every kind of request are each whole once; then each is asked for again while the server that
writes it gets SIGKILL (with ``--stop``: SIGSTOP) after a random chunk. Prints how many were the same, and the longest
gap between two chunks. It needs an environment with Ray (``scripts/scale`` makes .venv/scale).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import Measuring, at_least_one

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "steps": {"type": "array"}},
    "required": ["name", "steps"],
}
KINDS: dict[str, dict[str, Any]] = {  # what a request has beside its messages
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5},
    "unseeded": {"temperature": 0, "stream_options": {"include_usage": True}},
    "penalties": {"seed": 6, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "stop": {"seed": 7, "stop": ["the end of the", "\n\n\n"]},
    "grammar": {"seed": 8, "guided_regex": "[a-z ,.]{140,160}"},
    "schema": {
        "seed": 9, "response_format": {"type": "json_schema", "json_schema": {"name": "recipe", "schema": _SCHEMA}},
    },
    "tools": {"seed": 10, "tools": [_TOOL], "tool_choice": "required"},
    "several": {"seed": 11, "n": 3},
    "logprobs": {"seed": 12, "logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    "texts": {"seed": 13, "prompt": ["One, two, three,", "The baker of the village"], "n": 2},
    "response": {"seed": 14, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "response calls": {"seed": 15, "tools": [_TOOL["function"] | {"type": "function"}],
                       "tool_choice": "required"},
    "message": {"seed": 16, "system": "You are a baker."},
}  # fmt: skip
_TOKEN = secrets.token_hex(32)  # Ray makes one only where it starts by itself, `ray start` asks for one that there is
_PATHS = {"texts": "completions", "response": "responses", "response calls": "responses", "message": "messages"}


@dataclass(frozen=True, slots=True)
class Asked:
    """``path``: after /v1/."""

    path: str
    body: dict[str, Any]


class Replicas:
    """``outpace serve --replicas``. ``url``: of the ingress."""

    def __init__(self, python: str, count: str, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "outpace", "serve", "--replicas", count, "--port", str(port), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables())
        assert self.process.stderr is not None
        text = ""
        for line in self.process.stderr:
            text += line
            if " replicas at http" in line:
                break
        else:
            raise OSError(f"outpace serve --replicas ended with {self.process.wait()}:\n{text}")
        self._reading = threading.Thread(target=self.process.stderr.read, daemon=True)  # or a full pipe blocks it
        self._reading.start()

    def servers(self) -> dict[int, str]:
        """URLs of the replicas' servers by process id; they are descendants of this process."""
        return servers(descendants(self.process.pid))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reading.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


class Cluster:
    """Ray on this machine, as ``ray start --head`` starts it. ``url``: of the ingress that ``serve`` starts on it."""

    def __init__(self, python: str, host: str = "127.0.0.1", cores: int = 4) -> None:
        self.address, self._port, agent, client = (f"{host}:{free_port()}", *(free_port() for _ in range(3)))
        self._python, self.url = python, f"http://127.0.0.1:{self._port}"
        self.process = self._start(
            "--head", "--port", self.address.partition(":")[2], "--node-ip-address", host, "--num-cpus", str(cores),
            "--include-dashboard", "false", "--dashboard-agent-listen-port", str(agent),
            "--ray-client-server-port", str(client),
        )  # fmt: skip

    def _start(self, *options: str, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        command = [*within, self._python, "-m", "ray.scripts.scripts", "start", "--block", *options]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables())

    def serve(self, count: str, *options: str) -> None:
        """Start replicas, or replace those that there are. Raises OSError."""
        words = ["serve", "--replicas", count, "--ray", self.address, "--port", str(self._port), *options]
        failure = ""
        for _ in range(30):  # Ray may not listen yet
            if self.process.poll() is not None:
                raise OSError(f"ray start ended with {self.process.returncode}")
            ran = subprocess.run(
                [self._python, "-m", "outpace", *words], capture_output=True, text=True, env=variables()
            )
            if ran.returncode == 0:
                return
            failure = f"outpace serve --ray ended with {ran.returncode}:\n{ran.stderr}"
            time.sleep(1)
        raise OSError(failure)

    def servers(self) -> dict[int, str]:
        return servers(descendants(self.process.pid))

    def ingress(self) -> list[int]:
        """Processes that run the ingress."""
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(self.process.pid)}
        return [pid for pid, path in commands.items() if path.exists() and b":Ingress" in path.read_bytes()]

    def close(self) -> None:
        for pid in descendants(self.process.pid)[::-1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def variables() -> dict[str, str]:
    """Of the environment in which Ray runs."""
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    return {**os.environ, "OUTPACE_API_KEYS": "", **ray}


def free_port() -> int:
    """One that neither the system gives to those who ask for any nor Ray to its workers."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def servers(pids: Iterable[int]) -> dict[int, str]:
    """URLs of the replicas' servers among these processes, by process id."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"serve" in command and b"--replicas" not in command and (where := _listens(pid)):
                found[pid] = f"http://{where}"
    return found


def descendants(parent: int) -> list[int]:
    """Ray's processes have other parents; all belong to the session of the process that began them, or below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = list(children.get(parent, []))
    for each in found:
        found += children.get(each, [])
    return found


def _listens(pid: int) -> str | None:
    """The address at which a process listens, in its network."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(link))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            host, _, port = fields[1].partition(":")
            return f"{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}"
    return None


def busy(servers: Mapping[int, str]) -> int | None:
    """The one of ``servers`` that writes an answer."""
    for pid, url in servers.items():
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"{url}/metrics", timeout=5).text
            if float(re.findall(r"^outpace_requests_inside (.+)", text, re.MULTILINE)[0]) > 0:
                return pid
    return None


def stream(url: str, asked: Asked, at: int = -1, act: Callable[[], None] | None = None) -> tuple[Any, float]:
    """What a stream adds up to, and its longest gap in seconds; ``act`` is called before chunk ``at`` is read."""
    total: dict[str, Any] = {"ids": set(), "choices": {}, "usage": None, "error": None, "numbers": [], "chunks": 0}
    last, gap = time.monotonic(), 0.0
    body = {**asked.body, "stream": True}
    with httpx.stream("POST", f"{url}/v1/{asked.path}", json=body, timeout=300) as answer:
        if answer.status_code != 200:
            raise OSError(answer.read().decode())
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            if total["chunks"]:
                gap = max(gap, time.monotonic() - last)
            if total["chunks"] == at and act is not None:
                act()
            last = time.monotonic()
            _add(total, json.loads(line[6:]))
    return total, gap


def _add(total: dict[str, Any], chunk: dict[str, Any]) -> None:
    total["chunks"] += 1
    if error := chunk.get("error") or (chunk.get("response") or {}).get("error"):
        total["error"] = error
        return
    if "type" in chunk:
        _add_event(total, chunk)
        return
    total["ids"].add(chunk["id"])
    total["usage"] = (chunk.get("usage") or {}).get("completion_tokens", total["usage"])
    for choice in chunk["choices"]:
        one = total["choices"].setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "calls": {}})
        delta = choice.get("delta", {})
        one["text"] += choice.get("text") or delta.get("content") or ""
        one["ids"] += choice.get("token_ids") or []
        one["logprobs"] += (choice["logprobs"] or {}).get("content") or []
        one["role"] = one.get("role", 0) + ("role" in delta)
        for call in delta.get("tool_calls") or []:
            known = one["calls"].setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
            known["name"] += call["function"].get("name") or ""
            known["arguments"] += call["function"]["arguments"]
        one["finish"] = choice["finish_reason"]


def _add_event(total: dict[str, Any], event: dict[str, Any]) -> None:
    """Of /v1/responses and /v1/messages. What belongs to one server (ids, what its cache had) is left out."""
    at = event.get("output_index", event.get("index"))
    one = total["choices"].setdefault(at, {"text": "", "logprobs": [], "others": []})
    if "sequence_number" in event:
        total["numbers"].append(event["sequence_number"])
    if event["type"] in ("message_delta", "response.completed", "response.incomplete"):
        usage = event.get("response", event).pop("usage")
        total["usage"] = usage["output_tokens"]
    for name in ("response", "item"):
        if name in event:
            total["ids"].add(event[name].pop("id").partition("_")[2][:32])
    for item in event.get("response", {}).get("output", []):
        total["ids"].add(item.pop("id").partition("_")[2][:32])
    if "message" in event:
        total["ids"].add(event["message"].pop("id"))
    if event["type"].endswith("delta") and event["type"] != "message_delta":
        delta = event["delta"]
        one["text"] += delta if isinstance(delta, str) else "".join(v for k, v in delta.items() if k != "type")
        one["logprobs"] += event.get("logprobs") or []
        return
    for name in ("created_at", "completed_at"):
        event.get("response", {}).pop(name, None)
    one["others"].append({k: v for k, v in event.items() if k not in ("sequence_number", "item_id")})


def request(kind: str, number: int = 0) -> Asked:
    words = f"Tell a long story about {number} friends who bake bread in a mountain village."
    path, body = _PATHS.get(kind, "chat/completions"), dict(KINDS[kind])
    if path == "responses":
        return Asked(path, {**body, "input": words, "max_output_tokens": 160})
    if path != "completions":
        body["messages"] = [{"role": "user", "content": words}]
    return Asked(path, {**body, "max_tokens": 160})


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two streams are one answer, each unbroken."""
    return (
        found["error"] is None
        and len(found["ids"]) == 1
        and found["numbers"] == list(range(len(found["numbers"])))
        and all(found[name] == wanted[name] for name in ("choices", "usage"))
    )


def broken(
    running: Replicas, kind: str, wanted: dict[str, Any], number: int, sent: signal.Signals
) -> tuple[bool, float]:
    """A stream whose server gets a signal: whether it was the same, and its longest gap in seconds; below 0: it was
    written before its server could be found."""
    at = random.randrange(1, max(2, wanted["chunks"] // 2))
    hit: list[int] = []
    servers = running.servers()

    def act() -> None:
        if (pid := busy(servers)) is not None:  # else it has been written, but not read
            hit.append(pid)
            os.kill(pid, sent)

    found, gap = stream(running.url, request(kind, number % 7), at, act)
    if hit and sent == signal.SIGSTOP:
        with contextlib.suppress(OSError):
            os.kill(hit[0], signal.SIGCONT)
    if not same(found, wanted):
        print(f"round {number}, {kind}, chunk {at}: NOT THE SAME\n{found}\n{wanted}")
    return same(found, wanted), gap if hit else -1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default=".venv/scale/bin/python", help="an environment with outpace[ray]")
    parser.add_argument("--rounds", type=at_least_one, default=200)
    parser.add_argument("--stop", action="store_true", help="SIGSTOP in place of SIGKILL")


def run(given: argparse.Namespace) -> int:
    sent = signal.SIGSTOP if given.stop else signal.SIGKILL
    gaps, rounds, differ = [], 0, 0
    with closing(Replicas(given.python, "3", "--max-length", "1024", "--drafter", "ngram")) as running:
        wanted = {(kind, i): stream(running.url, request(kind, i))[0] for kind in KINDS for i in range(7)}
        with Measuring() as measuring:
            for number in range(given.rounds):
                kind = list(KINDS)[number % len(KINDS)]
                while len(running.servers()) < 2:
                    time.sleep(0.1)
                equal, gap = broken(running, kind, wanted[kind, number % 7], number, sent)
                rounds += 1
                differ += not equal
                gaps += [gap] if gap >= 0 else []
    gaps.sort()
    hits = f"{len(gaps)} of whose servers got {sent.name}"
    print(f"{rounds} streams, {hits}: {rounds - differ} the same")
    if gaps:
        p99 = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
        print(f"longest gap: median {statistics.median(gaps):.2f} s, p99 {p99:.2f} s, most {gaps[-1]:.2f} s")
    return measuring.end(int(differ > 0))
