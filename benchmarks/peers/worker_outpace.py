"""A worker that answers with Outpace: one drafter spec, by streaming, as the others do.

python -m benchmarks.peers.worker_outpace MODEL SPEC
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from outpace import Engine, SamplingParams

THREADS = 2


def answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    times: list[float] = []
    first_tokens, result = 0, None
    begun = time.perf_counter()
    for delta in engine.stream(asked["tokens"], SamplingParams(max_tokens=asked["max_tokens"])):
        if delta.token_ids:
            times.append(time.perf_counter())
            first_tokens = first_tokens or len(delta.token_ids)
        result = delta.result or result
    assert result is not None
    return {
        "ids": list(result.token_ids),
        "tokens": len(result.token_ids),
        "first_tokens": first_tokens,
        "first": times[0] - begun,
        "rest": times[-1] - times[0],
        "drafted": result.stats.drafted,
        "accepted": result.stats.accepted,
        "steps": result.stats.steps,
        "decision": result.stats.decision,
    }


def main() -> None:
    with Engine.load(sys.argv[1], drafter=sys.argv[2], threads=THREADS) as engine:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
