"""transformers' prompt lookup beside Outpace on the same model, type and threads, prompt by prompt in turn.

    python -m benchmarks lookup --prompts spec_bench_dev.jsonl --limit 12 -d suffix -d suffix+eagle:demo

Whole calls are timed, the prompt's reading among them. Every prompt is a pair: the speeds' ratio over transformers'.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Measuring, add_json, emit
from outpace import Engine, SamplingParams
from outpace.common.arrays import I32
from outpace.measure.prompts import encode_turns, read_prompts
from outpace.models import demo
from outpace.models.weights.gguf import GGUFFile

Answer = tuple[list[int], float]  # tokens, seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the demo model's)")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--drafter", "-d", action="append", help="default: ngram")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-tokens", "-n", type=int, default=64)
    parser.add_argument("--threads", type=int, help="default: as torch has them")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    import torch

    from outpace.models.torch import gguf

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    path: Path = given.model or demo.smollm2()
    module = gguf.build(GGUFFile.open(path), getattr(torch, given.dtype), torch.device("cpu"))
    module.set_attn_implementation("sdpa")
    module.generation_config.pad_token_id = 0
    drafters = given.drafter or ["ngram"]
    load: dict[str, Any] = {"backend": "transformers", "dtype": given.dtype, "prefix_rows": 0}
    engines = [Engine.load(str(path), drafter=spec, **load) for spec in drafters]
    eos = list(engines[0].model.info.eos_ids)

    def theirs(prompt: I32) -> Answer:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        options = {"do_sample": False, "max_new_tokens": given.max_tokens, "eos_token_id": eos}
        start = time.perf_counter()
        found = module.generate(ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=10, **options)
        return found[0, len(prompt) :].tolist(), time.perf_counter() - start

    def ours(engine: Engine, prompt: I32) -> Answer:
        start = time.perf_counter()
        result = engine.generate(prompt.tolist(), SamplingParams(max_tokens=given.max_tokens))
        return list(result.token_ids), time.perf_counter() - start

    prompts = [encode_turns(engines[0], row) for row in read_prompts(given.prompts, given.limit)]
    pairs: list[list[tuple[Answer, Answer]]] = [[] for _ in engines]
    with Measuring() as measuring:
        for i, prompt in enumerate([prompts[0], *prompts]):
            before = theirs(prompt) if i % 2 else None
            answers = [ours(engine, prompt) for engine in engines]
            before = before or theirs(prompt)  # every second prompt in the other order
            if i:  # the first pass warms up
                for found, answer in zip(pairs, answers, strict=True):
                    found.append((answer, before))
    figures = {}
    for spec, found in zip(drafters, pairs, strict=True):
        speeds = np.array([[len(tokens) / seconds for tokens, seconds in pair] for pair in found])
        ratios = speeds[:, 0] / speeds[:, 1]
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        same = sum(a[0][: len(b[0])] == b[0][: len(a[0])] for a, b in found)
        figures[spec] = {
            "ratio": median, "quartiles": [low, high], "prompts": len(found), "same": same,
            "tokens_per_second": np.median(speeds, axis=0).tolist(),
        }  # fmt: skip
        print(
            f"{spec}: {median:.2f} x transformers' prompt lookup [{low:.2f}, {high:.2f}], median tokens/s "
            f"{np.median(speeds[:, 0]):.1f} and {np.median(speeds[:, 1]):.1f}; same tokens in {same} of {len(found)}"
        )
    emit(given, {"figures": figures})
    return measuring.end(0)
