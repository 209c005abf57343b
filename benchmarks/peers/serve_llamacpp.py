"""llama.cpp's server (package xllamacpp) at a port, for ``benchmarks.serving`` and ``benchmarks.invariance``.

    --server llamacpp='ENV/bin/python benchmarks/peers/serve_llamacpp.py MODEL.gguf {port} [MODE [THREADS]]'

MODE: plain, or a way to speculate without a draft model, such as ngram-simple. Runs in its own environment. The wheel
is compiled for AVX2: worker_llamacpp.py has more of that. Slots and memory are what our server has: 16 rows.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp

THREADS = 2
ROWS = 16
CONTEXT = 2048  # tokens of a row


def main() -> None:
    path, port = sys.argv[1], int(sys.argv[2])
    mode = sys.argv[3] if len(sys.argv) > 3 else "plain"
    threads = int(sys.argv[4]) if len(sys.argv) > 4 else THREADS
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = ROWS
    params.n_ctx = ROWS * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_ram_mib = 0
    if mode != "plain":
        name = "COMMON_SPECULATIVE_TYPE_" + mode.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
