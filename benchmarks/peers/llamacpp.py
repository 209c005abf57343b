"""llama.cpp: the package xllamacpp in its own environment, or a `llama-server`; imports nothing of Outpace.

    python llamacpp.py MODEL.gguf MODE                  # a worker; MODE: plain, or an n-gram mode, as ngram-simple
    python llamacpp.py MODEL.gguf MODE --binary build/bin/llama-server [--drafter DRAFTER.gguf]
    --server llamacpp='ENV/bin/python benchmarks/peers/llamacpp.py MODEL.gguf MODE {port}'    # of serving, invariance

The Linux wheel is compiled for AVX2, without AVX-512, as its README and get_system_info() say. A llama.cpp built on the
processor itself is faster. MODE with `--binary` is what its --spec-type takes; draft-eagle3, with a GGUF file of
an EAGLE-3.1, needs our patch: two norms that it does not know, and no feed-forward where only keys are stored. It is
built so:

    pip download llama-cpp-python==0.3.36 --no-deps --no-binary :all:
    tar xf llama_cpp_python-0.3.36.tar.gz
    cd llama_cpp_python-0.3.36/vendor/llama.cpp
    patch -p1 < benchmarks/peers/eagle3.patch       # of this repository
    cmake -B build -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF .
    cmake --build build --target llama-server -j

A worker reads a JSON line {"tokens", "max_tokens"} and writes one: text, tokens, seconds to the first delta, seconds of
the rest. A server has what ours has: 16 rows.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

THREADS = 2
ROWS = 16  # of a server
CONTEXT = 2048  # tokens of a server's row
EAGLE3 = ("--spec-draft-n-max", "3", "--spec-draft-p-min", "0.75")  # the fastest with our demo's drafter
PATIENCE = 120  # seconds until a binary answers

Chunks = Callable[[dict[str, Any], Callable[[Any], None]], object]  # what is asked, and who hears each chunk


def server(path: str, mode: str, port: int | None = None) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx = (1, 8192) if port is None else (ROWS, ROWS * CONTEXT)
    if port is not None:
        params.hostnames, params.port = ["127.0.0.1"], port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_ram_mib = 0
    params.verbosity = 0 if port is None else params.verbosity
    if mode != "plain":
        name = "COMMON_SPECULATIVE_TYPE_" + mode.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    return xllamacpp.Server(params)


def package(model: str, mode: str) -> Chunks:
    engine = server(model, mode)
    return lambda request, take: engine.handle_completions(json.dumps(request), take)


def binary(path: str, model: str, mode: str, drafter: str | None) -> Chunks:
    """Of a `llama-server` that is started here, with one row."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [path, "-m", model, "-t", str(THREADS), "-c", "8192", "-np", "1", "--cache-ram", "0", "--port", str(port)]
    if mode != "plain":
        command += ["--spec-type", mode, *(["-md", drafter, *EAGLE3] if drafter else [])]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)

    def ask(method: str, where: str, body: str | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request(method, where, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def ready() -> bool:
        try:
            return ask("GET", "/health").status == 200
        except (OSError, http.client.HTTPException):
            return False

    end = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{path} does not answer: it ended with {process.poll()}")
        time.sleep(0.1)

    def chunks(request: dict[str, Any], take: Callable[[Any], None]) -> None:
        for line in ask("POST", "/v1/completions", json.dumps(request)):
            if line.startswith(b"data: {"):
                take(line.removeprefix(b"data: "))
            elif line.startswith((b"error: ", b"{")):
                raise RuntimeError(line.decode())

    return chunks


def answer(chunks: Chunks, asked: dict[str, Any]) -> dict[str, Any]:
    times: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}

    def take(found: Any) -> None:
        chunk = json.loads(found) if isinstance(found, (str, bytes)) else found
        if chunk.get("error"):
            raise RuntimeError(str(chunk["error"]))
        text = chunk["choices"][0]["text"]
        if text:
            times.append(time.perf_counter())
            pieces.append(text)
        usage.update(chunk.get("usage") or {})
        usage.update(chunk.get("timings") or {})

    request = {
        "prompt": asked["tokens"],
        "n_predict": asked["max_tokens"],
        "temperature": 0,
        "stream": True,
        "cache_prompt": False,
    }
    begun = time.perf_counter()
    chunks(request, take)
    end = time.perf_counter()
    return {
        "text": "".join(pieces),
        "tokens": usage["completion_tokens"],
        "first": (times[0] if times else end) - begun,
        "rest": times[-1] - times[0] if times else 0.0,
        "drafted": usage.get("draft_n"),
        "accepted": usage.get("draft_n_accepted"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker, or with PORT a server.")
    parser.add_argument("model")
    parser.add_argument("mode")
    parser.add_argument("port", nargs="?", type=int)
    parser.add_argument("--binary")
    parser.add_argument("--drafter")
    given = parser.parse_args()
    if given.port is not None:
        print(server(given.model, given.mode, given.port).listening_address, flush=True)
        threading.Event().wait()
    out = os.fdopen(os.dup(1), "w")  # llama.cpp may print to the standard output
    os.dup2(2, 1)
    model, mode = given.model, given.mode
    chunks = binary(given.binary, model, mode, given.drafter) if given.binary else package(model, mode)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(chunks, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
