"""``outpace serve`` as a process: told to stop under load it answers everybody; killed, it is back within seconds."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

BODY = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 40, "seed": 1, "ignore_eos": True}


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port."""
    environment = {**os.environ, "OUTPACE_API_KEYS": ""}
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--max-length", "1024", "--drafter", "ngram"]
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


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
        time.sleep(0.2)
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


def test_another_model_is_loaded_when_it_is_asked_for() -> None:
    with process("--also", "demo-gemma", "--model-memory", "2GiB", "--kv-memory", "256MiB") as (_, port):
        for name in ("demo-gemma", "demo"):
            status, answer = ask(port, {"prompt": "One two", "model": name, "max_tokens": 2}, "/v1/completions")
            assert (status, answer.get("model")) == (200, name), answer
