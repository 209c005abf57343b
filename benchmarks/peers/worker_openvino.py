"""A worker that answers with OpenVINO GenAI. Runs in its own environment; imports nothing of Outpace.

    python worker_openvino.py MODEL.gguf MODE      # MODE: plain, paged (plain on the paged backend), or lookup-5
    python worker_openvino.py FOLDER eagle-4       # chains of 4 tokens; FOLDER: of eagle_openvino.py

With -f32 after MODE it computes in float32, not in what it prefers on the processor (bfloat16 on many).
Reads a JSON line {"tokens", "max_tokens", "eos"}, writes one: token ids, seconds to the first delta, of the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

THREADS = 2


class Deltas(openvino_genai.StreamerBase):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.first_tokens = 0

    def write(self, tokens: Any) -> Any:
        if not self.times:
            self.first_tokens = 1 if isinstance(tokens, int) else len(tokens)
        self.times.append(time.perf_counter())
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def pipeline(path: str, mode: str) -> Any:
    kind, *rest = mode.split("-")
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": THREADS}
    if "f32" in rest:
        options["INFERENCE_PRECISION_HINT"] = "f32"
    if kind == "eagle":
        options["draft_model"] = openvino_genai.draft_model(f"{path}/draft", "CPU", **options)
        path += "/target"
    if kind in ("paged", "eagle"):
        options["scheduler_config"] = openvino_genai.SchedulerConfig()
        options["scheduler_config"].cache_size = 1
    if kind == "lookup":
        options["prompt_lookup"] = True
    return openvino_genai.LLMPipeline(path, "CPU", **options)


def answer(engine: Any, mode: str, asked: dict[str, Any]) -> dict[str, Any]:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample = asked["max_tokens"], False
    config.eos_token_id, config.stop_token_ids = asked["eos"], {asked["eos"]}
    kind, *rest = mode.split("-")
    if kind in ("lookup", "eagle"):
        config.num_assistant_tokens = int(rest[0])
    if kind == "lookup":
        config.max_ngram_size = 3
    deltas = Deltas()
    begun = time.perf_counter()
    found = engine.generate(openvino.Tensor(np.array([asked["tokens"]], np.int64)), config, deltas)
    ids = list(found.tokens[0])
    accepted = found.extended_perf_metrics.get_num_accepted_tokens() if kind == "eagle" else None
    return {
        "ids": ids,
        "tokens": len(ids),
        "first_tokens": deltas.first_tokens,
        "first": deltas.times[0] - begun,
        "rest": deltas.times[-1] - deltas.times[0],
        "accepted": accepted,
        "steps": None if accepted is None else len(ids) - accepted,
    }


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = pipeline(sys.argv[1], sys.argv[2])
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, sys.argv[2], json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
