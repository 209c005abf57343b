"""``outpace.patch`` beside transformers' prompt lookup on the same weights and threads, prompt by prompt in turn.

    python -m benchmarks lookup --prompts spec_bench_dev.jsonl --limit 12 --dtype bfloat16 --dtype float32

Whole calls of ``generate`` are timed, the prompt's reading among them. Every prompt is a pair: the speeds' ratio over
transformers'. The first two calls, which may still measure what steps cost, are pairs, too, counted apart; so are
answers that end in a loop, which drafts far better than other text.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import numpy as np

import outpace
from benchmarks.figures import Measuring, add_json, emit
from outpace.common.arrays import I32, repeated_tail
from outpace.measure.prompts import encode_turns, read_prompts
from outpace.models import demo
from outpace.models.weights.gguf import GGUFFile

FIRST = 2  # calls
Answer = tuple[list[int], float]  # tokens, seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the demo model's)")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--drafter", "-d", action="append", help="default: auto")
    parser.add_argument("--dtype", action="append", help="default: bfloat16")
    parser.add_argument("--max-tokens", "-n", type=int, default=64)
    parser.add_argument("--threads", type=int, help="default: as torch has them")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    import torch

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    path: Path = given.model or demo.smollm2()
    with outpace.Engine.load(str(path), drafter=None) as engine:
        eos = list(engine.model.info.eos_ids)
        prompts = [encode_turns(engine, row) for row in read_prompts(given.prompts, given.limit)]
    drafters = given.drafter or ["auto"]
    with Measuring() as measuring:
        figures = {
            f"{spec} {dtype}": each
            for dtype in given.dtype or ["bfloat16"]
            for spec, each in _compared(path, dtype, drafters, prompts, eos, given.max_tokens).items()
        }
    emit(given, {"figures": figures})
    return measuring.end(0)


def _compared(
    path: Path, dtype: str, drafters: list[str], prompts: list[I32], eos: list[int], longest: int
) -> dict[str, Any]:
    """Figures of each drafter in ``dtype``; prints them."""
    import torch

    from outpace.models.torch import gguf

    module = gguf.build(GGUFFile.open(path), getattr(torch, dtype), torch.device("cpu"))
    module.set_attn_implementation("sdpa")
    module.generation_config.pad_token_id = 0
    patched = [copy.deepcopy(module) for _ in drafters]
    for each, spec in zip(patched, drafters, strict=True):
        outpace.patch(each, drafter=spec)

    def answer(model: Any, prompt: I32, **asked: Any) -> Answer:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        asked |= {"do_sample": False, "max_new_tokens": longest, "eos_token_id": eos}
        start = time.perf_counter()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        return found[0, len(prompt) :].tolist(), time.perf_counter() - start

    answer(module, prompts[0], prompt_lookup_num_tokens=10)  # libraries choose and allocate in the first call
    pairs: list[list[tuple[Answer, Answer]]] = [[] for _ in drafters]
    for i, prompt in enumerate([*prompts[:FIRST], *prompts]):
        before = answer(module, prompt, prompt_lookup_num_tokens=10) if i % 2 else None
        answers = [answer(each, prompt) for each in patched]
        before = before or answer(module, prompt, prompt_lookup_num_tokens=10)  # every second prompt the other way
        for found, ours in zip(pairs, answers, strict=True):
            found.append((ours, before))
    figures = {}
    for spec, found in zip(drafters, pairs, strict=True):
        speeds = np.array([[len(tokens) / seconds for tokens, seconds in pair] for pair in found])
        ratios, speeds = speeds[:, 0] / speeds[:, 1], speeds[FIRST:]
        low, median, high = np.quantile(ratios[FIRST:], (0.25, 0.5, 0.75)).tolist()
        calm = np.array([not repeated_tail(ours[0]) for ours, _ in found[FIRST:]])
        without = float(np.median(ratios[FIRST:][calm])) if calm.any() else None
        same = sum(a[0][: len(b[0])] == b[0][: len(a[0])] for a, b in found[FIRST:])
        figures[spec] = {
            "ratio": median, "quartiles": [low, high], "least": float(ratios[FIRST:].min()), "same": same,
            "looping": int((~calm).sum()), "without_loops": without,
            "first": ratios[:FIRST].tolist(), "prompts": len(prompts),
            "tokens_per_second": np.median(speeds, axis=0).tolist(),
        }  # fmt: skip
        print(
            f"{dtype}, {spec}: {median:.2f} x transformers' prompt lookup [{low:.2f}, {high:.2f}], at least "
            f"{ratios[FIRST:].min():.2f}, first calls {', '.join(f'{r:.2f}' for r in ratios[:FIRST])}; median tokens/s "
            f"{np.median(speeds[:, 0]):.1f} and {np.median(speeds[:, 1]):.1f}; same tokens in {same} of {len(prompts)};"
            f" loops end {(~calm).sum()} answers, without these {'-' if without is None else f'{without:.2f}'}"
        )
    return figures
