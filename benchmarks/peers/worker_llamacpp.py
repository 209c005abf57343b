"""A worker that answers with llama.cpp (package xllamacpp). Runs in its own environment; imports nothing of Outpace.

    python worker_llamacpp.py MODEL.gguf MODE      # MODE: plain, or one of llama.cpp's n-gram modes, as ngram-simple

The Linux wheel is compiled for AVX2, without AVX-512, as its README and get_system_info() say: on a processor that has
AVX-512 a llama.cpp built there can be faster, and every ratio to llama.cpp here is to this wheel. Its source package
does not build without a network, for it fetches BoringSSL.

Reads a JSON line {"tokens", "max_tokens"}, writes one: text, tokens, seconds to the first delta, seconds of the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import xllamacpp

THREADS = 2


def server(path: str, mode: str) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 8192
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_ram_mib = 0
    params.verbosity = 0
    if mode != "plain":
        name = "COMMON_SPECULATIVE_TYPE_" + mode.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    return xllamacpp.Server(params)


def answer(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    times: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}

    def hear(found: Any) -> None:
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
    engine.handle_completions(json.dumps(request), hear)
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
    out = os.fdopen(os.dup(1), "w")  # llama.cpp may print to the standard output
    os.dup2(2, 1)
    engine = server(sys.argv[1], sys.argv[2])
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
