"""llama.cpp: the package xllamacpp in its own environment, or a `llama-server`; imports nothing of Outpace.

    python llamacpp.py MODEL.gguf MODE                  # a worker; MODE: plain, or an n-gram mode, as ngram-simple
    python llamacpp.py MODEL.gguf MODE --binary build/bin/llama-server [--drafter DRAFTER.gguf] [--ik]
    --server llamacpp='ENV/bin/python benchmarks/peers/llamacpp.py MODEL.gguf MODE {port}'    # of serving, invariance

The Linux wheel is compiled for AVX2, without AVX-512, as its README and get_system_info() say. A llama.cpp built on the
processor itself is faster (`--binary`). MODE is then what its --spec-type takes; with a GGUF file as drafter that is
draft-simple (draft, of ik_llama.cpp) for a small model, and draft-eagle3 for one that `outpace export gguf` made.
`--ik`: the binary is ik_llama.cpp's, whose faster kernels want the weights packed anew at load (-rtr).

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
DRAFTS = ("--spec-draft-n-max", "3", "--spec-draft-p-min", "0.75")  # the fastest with our demo's drafter
PATIENCE = 120  # seconds until a binary answers
WIDTHS = (1, 2, 4, 8, 16)

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


def binary(path: str, model: str, mode: str, drafter: str | None, ik: bool) -> Chunks:
    """Of a `llama-server` that is started here, with one row."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [path, "-m", model, "-t", str(THREADS), "-c", "8192", "-np", "1", "--cache-ram", "0", "--port", str(port)]
    if mode != "plain":
        command += [
            "--spec-type",
            mode,
            *(["-md", drafter] if drafter else []),
            *(DRAFTS if drafter and not ik else ()),
        ]
    command += ["-rtr"] if ik else []
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


def llama_bench(binary: str, path: os.PathLike[str], threads: int, widths: tuple[int, ...] = WIDTHS) -> list[Any]:
    """Milliseconds of forwards of ``widths`` tokens at the beginning of a text, by llama.cpp's llama-bench."""
    sizes = ",".join(map(str, widths))
    command = [*binary.split(), "-m", str(path), "-t", str(threads), "-p", sizes, "-n", "0", "-r", "8", "-o", "json"]
    entries = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [{"width": entry["n_prompt"], "ms": entry["avg_ns"] / 1e6} for entry in entries]


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
    parser.add_argument("--ik", action="store_true")
    given = parser.parse_args()
    if given.port is not None:
        print(server(given.model, given.mode, given.port).listening_address, flush=True)
        threading.Event().wait()
    out = os.fdopen(os.dup(1), "w")  # llama.cpp may print to the standard output
    os.dup2(2, 1)
    model, mode = given.model, given.mode
    built = given.binary
    chunks = binary(built, model, mode, given.drafter, given.ik) if built else package(model, mode)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(chunks, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
