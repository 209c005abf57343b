"""llama.cpp (package xllamacpp), in its own environment: imports nothing of Outpace.

    python llamacpp.py MODEL.gguf MODE                  # a worker; MODE: plain, or an n-gram mode, as ngram-simple
    --server llamacpp='ENV/bin/python benchmarks/peers/llamacpp.py MODEL.gguf MODE {port}'    # of serving, invariance

The Linux wheel is compiled for AVX2, without AVX-512, as its README and get_system_info() say: on a processor that has
AVX-512 a llama.cpp built there can be faster, and every ratio to llama.cpp here is to this wheel. Its source package
does not build without a network, for it fetches BoringSSL.

A worker reads a JSON line {"tokens", "max_tokens"} and writes one: text, tokens, seconds to the first delta, seconds of
the rest. A server has what ours has: 16 rows.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import xllamacpp

THREADS = 2
ROWS = 16  # of a server
CONTEXT = 2048  # tokens of a server's row


def server(path: str, mode: str, port: int | None = None) -> Any:
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


def answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
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
    engine.handle_completions(json.dumps(request), take)
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
    if len(sys.argv) > 3:
        print(server(sys.argv[1], sys.argv[2], int(sys.argv[3])).listening_address, flush=True)
        threading.Event().wait()
    out = os.fdopen(os.dup(1), "w")  # llama.cpp may print to the standard output
    os.dup2(2, 1)
    engine = server(sys.argv[1], sys.argv[2])
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
