"""``outpace serve`` as a process: told to stop under load it answers everybody; killed, it is back within seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from outpace.models.load import published_name
from tests.fake_hub import FakeHub, send, serving
from tests.native.native_helpers import Tiny

BODY = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 40, "seed": 1, "ignore_eos": True}


@contextmanager
def process(*options: str, files: int = 1024, **variables: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port. ``files``: that it may open; ``variables``: of its environment."""
    environment = {**os.environ, "OUTPACE_API_KEYS": "", **variables}
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--max-length", "1024", "--drafter", "ngram"]
    command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment) as its:
        try:
            assert its.stderr is not None
            for line in its.stderr:
                if found := re.search(r"at http://127\.0\.0\.1:(\d+)/v1", line):
                    break
            else:
                raise AssertionError(f"it ended with {its.wait()}")
            yield its, int(found[1])
        finally:
            its.kill()


def ask(port: int, body: dict[str, Any] = BODY, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    response = httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)
    return response.status_code, response.json()


def scraped(port: int, pattern: str) -> float:
    """The sum of all samples that are so named."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    return sum(map(float, re.findall(f"^{pattern}", text, re.MULTILINE)))


def test_killed_it_serves_the_same_again_and_told_to_stop_under_load_it_answers_everybody() -> None:
    with process() as (its, port):
        _, before = ask(port)
        its.kill()
    with process() as (its, port), ThreadPoolExecutor(8) as threads:
        _, after = ask(port)
        _, told = ask(port, {"request": BODY, "answer": before}, "/v1/replay")
        assert before["choices"] == after["choices"]
        assert before["system_fingerprint"] == after["system_fingerprint"]
        assert told["identical"] is True
        asked = [threads.submit(ask, port) for _ in range(8)]
        while scraped(port, r"outpace_requests_inside (.+)") + scraped(port, r"outpace_answers_total\S+ (.+)") < 10:
            time.sleep(0.01)  # two were answered before
        its.send_signal(signal.SIGTERM)
        answers = [future.result(60) for future in asked]
        assert {status for status, _ in answers} <= {200, 503}
        said = [answer["choices"][0]["message"] for status, answer in answers if status == 200]
        assert said == [before["choices"][0]["message"]] * max(len(said), 1)
        assert its.wait(30) == 0


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "outpace", "serve", "--port", port, "--model", "no/such/model"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr


@pytest.mark.parametrize(
    ("host", "keys", "warns"), [("0.0.0.0", "", True), ("::", "", True), ("0.0.0.0", "secret-key", False),
    ("127.0.0.1", "", False)],
)  # fmt: skip
def test_an_open_server_without_keys_warns(host: str, keys: str, warns: bool) -> None:
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--host", host, "--model", "no/such/model"]
    environment = {**os.environ, "OUTPACE_API_KEYS": keys, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode != 0
    assert (f"warning: whoever reaches {host} may ask" in done.stderr) is warns, done.stderr


def test_other_names_of_the_server_are_allowed_by_option() -> None:
    def status(port: int, host: str) -> int:
        return httpx.get(f"http://127.0.0.1:{port}/health", headers={"host": host}, timeout=60).status_code

    with process("--allow-host", "outpace.example") as (_, port):
        allowed = ("outpace.example", "OUTPACE.example:8000", "localhost", "a.localhost", "127.0.0.1", "[::1]:80")
        assert {host: status(port, host) for host in allowed} == dict.fromkeys(allowed, 200)
        others = ("evil.example", "a.outpace.example", "outpace.example.evil.example", "")
        assert {host: status(port, host) for host in others} == dict.fromkeys(others, 403)


def test_another_model_is_loaded_when_it_is_asked_for() -> None:
    with process("--also", "demo-gemma", "--model-memory", "2GiB", "--kv-memory", "256MiB") as (_, port):
        for name in ("demo-gemma", "demo"):
            status, answer = ask(port, {"prompt": "One two", "model": name, "max_tokens": 2}, "/v1/completions")
            assert (status, answer.get("model")) == (200, name), answer
        for name in ("demo-gemma", "demo"):  # Ollama's way to unload
            status, answer = ask(port, {"model": name, "prompt": "", "keep_alive": 0, "stream": False}, "/api/generate")
            assert (status, answer["done_reason"]) == (200, "unload")
            loaded = httpx.get(f"http://127.0.0.1:{port}/api/ps", timeout=60).json()["models"]
            assert name not in {each["name"] for each in loaded}
        assert httpx.get(f"http://127.0.0.1:{port}/ready", timeout=60).status_code == 200
        assert ask(port, {"prompt": "One", "model": "demo", "max_tokens": 2}, "/v1/completions")[0] == 200


def test_models_of_a_hub_come_by_name_once_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, in the memory of one: a download that is cut goes on; offline what is there is served, and nothing else."""
    hub, names = FakeHub(), ("some/a-GGUF:Q8_0", "some/b-GGUF:Q8_0")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    options = ["--also", names[1], "--model-memory", "1.5MiB", "--kv-memory", "1MiB", "--max-rows", "2"]

    def said(port: int, name: str) -> tuple[int, Any]:
        body = {"prompt": "abc", "model": name, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        status, answer = ask(port, body, "/v1/completions")
        return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]

    def loaded(port: int) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            found = re.findall(r'outpace_model_state\{model="([^"]+)",state="loaded"\} 1', answer.read().decode())
        return sorted(found)

    with Tiny() as tiny, serving(hub.answer) as url:
        for layers, name in enumerate("ab", 1):
            content = tiny.path("Q8_0", layers=layers, tokenizer=1, vocab=180).read_bytes()
            hub.files[f"some/{name}-GGUF"] = {f"{name}.Q8_0.gguf": content}
        hub.faults.append(lambda request: send(request, hub.files["some/a-GGUF"]["a.Q8_0.gguf"], most=5000))
        monkeypatch.setenv("HF_ENDPOINT", url)
        with process("-m", names[0], *options) as (_, port):
            first = [said(port, name) for name in (*names, *names)]
            assert [status for status, _ in first] == [200] * 4
            assert first[:2] == first[2:]
            assert first[0] != first[1]
            assert loaded(port) == [names[1]]
        fetched = [Path(path).name for path in hub.paths() if "/resolve/" in path]
        assert fetched == ["a.Q8_0.gguf", "a.Q8_0.gguf", "b.Q8_0.gguf"]
    asked = len(hub.asked)
    with process("-m", names[0], *options, "--also", "some/c-GGUF:Q8_0", "--offline") as (_, port):
        assert [said(port, name) for name in names] == first[:2]
        status, why = said(port, "some/c-GGUF:Q8_0")
        assert status >= 400
        assert "is not in the local cache" in why
    assert len(hub.asked) == asked


def test_spans_and_logs_of_a_process() -> None:
    """With --otel a collector gets the request's span, with --log-format json its line; both name the same request."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        where = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_SERVICE_NAME": "ours",
        }
        with process("--otel", "--log-format", "json", **where) as (its, port):
            status, answer = ask(port)
            assert status == 200
            its.send_signal(signal.SIGTERM)
            assert its.stderr is not None
            logged = [json.loads(line) for line in its.stderr if line.startswith("{")]
            assert its.wait(30) == 0
        collector.shutdown()
    (line,) = [each for each in logged if each["message"] == "answered"]
    sent = ExportTraceServiceRequest.FromString(got[0][1])
    (resource,) = sent.resource_spans
    assert {its.value.string_value for its in resource.resource.attributes if its.key == "service.name"} == {"ours"}
    (span,) = [span for scope in resource.scope_spans for span in scope.spans if scope.scope.name == "outpace"]
    told = {its.key: its.value for its in span.attributes}
    assert ({path for path, _ in got}, span.name) == ({"/v1/traces"}, "generate demo")
    assert told["gen_ai.response.id"].string_value == answer["id"] == line["id"]
    assert told["outpace.request_id"].string_value == line["request_id"]
    tokens = answer["usage"]["completion_tokens"]
    assert told["gen_ai.usage.output_tokens"].int_value == tokens == line["completion_tokens"]
    assert "Count" not in json.dumps(logged) + str(sent)


def test_models_are_called_by_names_that_are_no_paths(tmp_path: Path) -> None:
    with Tiny() as tiny:
        content = tiny.path("Q8_0", tokenizer=1, vocab=180).read_bytes()
    file, blob = tmp_path / "tiny-00001-of-00001.gguf", tmp_path / "sha256-0a"
    for path in (file, blob):
        path.write_bytes(content)
    body = {"prompt": "abc", "max_tokens": 1}

    def answered(port: int, name: str) -> Any:
        status, answer = ask(port, {**body, "model": name}, "/v1/completions")
        return answer["model"] if status == 200 else status

    with process("-m", str(file), "--alias", "small,tiny-model", "-a", "x") as (_, port):
        listed = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).json()["data"]
        assert [each["id"] for each in listed] == ["tiny", "small", "tiny-model", "x"]
        names = ("tiny", "small", "x", str(file), "other")
        assert [answered(port, name) for name in names] == ["tiny", "tiny", "tiny", "tiny", 404]
    with process("-m", str(blob), "--any-name") as (_, port):
        assert {answered(port, name) for name in ("claude-sonnet-5", "")} == {published_name(str(blob))}
        shown, _ = ask(port, {"model": "llama3:latest"}, "/api/show")
        assert shown == 200
    assert "/" not in published_name(str(blob))


def test_what_a_killed_server_has_kept_is_read_by_the_next(tmp_path: Path) -> None:
    """A conversation goes on at another server: only what is new is read, and its answers are those of one server."""
    messages = [{"role": "user", "content": "Count the words of this: " + "one two three four " * 40}]
    body = {**BODY, "messages": messages, "temperature": 0.7, "logprobs": True}
    followed = [*messages, {"role": "assistant", "content": "One."}, {"role": "user", "content": "And now?"}]
    with process() as (_, port):
        expected = [ask(port, body)[1]["choices"], ask(port, {**body, "messages": followed})[1]["choices"]]
    answers, folder = [], tmp_path / "kv"
    for turn in (messages, followed):
        with process("--cache-dir", str(folder), "--cache-size", "1GiB") as (_, port):
            answers.append(ask(port, {**body, "messages": turn})[1])
            until = time.monotonic() + 60
            while not scraped(port, "outpace_disk_written_bytes_total.* (.*)") and time.monotonic() < until:
                time.sleep(0.05)
            tokens = scraped(port, "outpace_disk_hit_tokens_total.* (.*)")
            assert tokens == answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert [answer["choices"] for answer in answers] == expected
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 < 128 <= tokens
    listed = [sys.executable, "-m", "outpace", "cache", "--cache-dir", str(folder), "--clear", "--json"]
    told = json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    assert told["freed"] > 0
    assert [(each["model"], each["files"]) for each in told["models"]] == [("demo", 0)]
    listed = [each for each in listed if each not in ("--clear", "--json")]
    assert "0 files  demo" in subprocess.run(listed, capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ("stop_token_ids=[999999]", "", "stop_token_ids has token id 999999, but this model's ids go from 0 to 49151"),
        ("max_tokens=4000", "--kv-memory 2MiB", "do not fit"),
        ("stop_token_ids=[49152]", "-m demo-gemma --also demo", "but this model's ids go from 0 to 49151"),
    ],
)
def test_defaults_that_a_model_cannot_have_are_errors_at_start(given: str, options: str, says: str) -> None:
    command = [*f"{sys.executable} -m outpace serve --port 0 -d none {options} --default".split(), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"--default {shlex.quote(given)} cannot be of requests to demo: " in done.stderr
    assert says in done.stderr
