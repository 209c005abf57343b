"""Tokens per step of model-free drafters, by replaying recorded outputs: minutes of decoding become seconds.

    python benchmarks/replay.py record PROMPTS.jsonl OUT.jsonl [--limit N]     # greedy, demo model, 200 tokens
    python benchmarks/replay.py run OUT.jsonl ngram suffix ngram+suffix --size 7 --size 15 [--until-eos]

Since greedy outputs do not depend on the drafter, a replay takes the steps that an engine takes. State is cleared for
every prompt, except what a spec keeps itself (``suffix:history=1``).
"""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext, Drafter, Event, RowView
from outpace.drafters.registry import build, parse
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.sampling import Chooser
from outpace.exact.verify import walk
from outpace.models.options import LoadOptions

VOCAB = 49_152
EOS = 2


def record(prompts: str, out: str, limit: int | None) -> None:
    with open(prompts) as file:
        rows = [json.loads(line) for line in file][:limit]
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    with Engine.load("demo", drafter="ngram") as engine, open(out, "w") as sink:
        for row in rows:
            prompt = engine.encode(row["turns"][0])
            result = engine.generate(prompt.tolist(), params)
            recorded = {"category": row["category"], "prompt": prompt.tolist(), "output": list(result.token_ids)}
            sink.write(json.dumps(recorded) + "\n")
        print(f"{engine.stats.tokens_per_step:.3f} tokens/step with ngram")


def replay(drafter: Drafter, row: dict[str, Any], request: int, size: int) -> tuple[int, int, int, float]:
    """(tokens, steps, nodes, seconds of the drafter) of one recorded output."""
    tokens = np.array(row["prompt"] + row["output"], np.int32)
    at, end, steps, nodes, seconds = len(row["prompt"]), len(tokens), 0, 0, 0.0
    prompt = at
    while at < end:
        chooser = Chooser(SamplingParams(), Noise(0), at - prompt)
        view = RowView(0, request, tokens[:at], end, chooser, "coupled")
        started = time.perf_counter()
        room = min(size, end - at - 1)
        drafts = drafter.propose([view], np.array([room], np.int32)) if room else Drafts.empty(1)
        seconds += time.perf_counter() - started
        draft = drafts.row(0)

        def choose(_: Any, nodes: Any, at: int = at, draft: Any = draft) -> Any:
            return np.array([tokens[at + len(draft.path(int(node)))] for node in nodes])

        verdict = walk(choose, drafts).row(0)
        started = time.perf_counter()
        drafter.observe([Event(0, at, verdict.tokens, verdict)])
        seconds += time.perf_counter() - started
        at, steps, nodes = at + len(verdict.tokens), steps + 1, nodes + len(draft)
    drafter.release(0, tokens)
    return end - prompt, steps, nodes, seconds


def run(path: str, specs: list[str], sizes: list[int], until_eos: bool) -> None:
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    for row in rows if until_eos else ():
        row["output"] = row["output"][: row["output"].index(EOS) + 1] if EOS in row["output"] else row["output"]
    target: Any = SimpleNamespace(info=SimpleNamespace(vocab_size=VOCAB))
    for spec in specs:
        for size in sizes:
            drafter = build(parse(spec), DraftContext(target, None, LoadOptions(), size))
            by: dict[str, np.ndarray[Any, Any]] = {}
            for request, row in enumerate(rows):
                by[row["category"]] = by.get(row["category"], np.zeros(4)) + replay(drafter, row, request, size)
            tokens, steps, nodes, seconds = np.sum(list(by.values()), axis=0)
            each = "  ".join(f"{name} {v[0] / v[1]:.2f}" for name, v in sorted(by.items()))
            print(
                f"{spec} size {size}: {tokens / steps:.3f} tokens/step, {nodes / steps:.1f} nodes, "
                f"{seconds / steps * 1e6:.0f} us/step | {each}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("prompts")
    recorder.add_argument("out")
    recorder.add_argument("--limit", type=int)
    runner = commands.add_parser("run")
    runner.add_argument("path")
    runner.add_argument("specs", nargs="+")
    runner.add_argument("--size", type=int, action="append")
    runner.add_argument("--until-eos", action="store_true")
    given = parser.parse_args()
    if given.command == "record":
        record(given.prompts, given.out, given.limit)
    else:
        run(given.path, given.specs, given.size or [7, 15], given.until_eos)


if __name__ == "__main__":
    main()
