"""What a proposal inside vLLM costs, in microseconds, by the number of rows.

    python -m benchmarks proposals                   # chains of 8 by ngram, suffix and both; 1 to 64 rows

Texts of 512 tokens repeat phrases of their own, and every draft is accepted as far as it is right. The engine's step is
the time between two calls, which is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.figures import add_json, at_least_one, emit
from outpace.common.arrays import I32
from outpace.integrations import vllm

VOCAB = 32_000
SPECS = ("ngram:size=8", "suffix:size=8", "ngram+suffix:history=1,size=8")  # a policy would draft by steps' times
ROWS = (1, 8, 32, 64)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafter", "-d", action="append", help=f"default: {' and '.join(SPECS)}")
    parser.add_argument("--rows", action="append", type=at_least_one, help=f"default: {ROWS}")
    parser.add_argument("--prompt", type=at_least_one, default=512, help="tokens before the first proposal")
    parser.add_argument("--steps", type=at_least_one, default=200)
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    found = []
    for spec in given.drafter or SPECS:
        for rows in given.rows or ROWS:
            times = proposals(spec, rows, given.prompt, given.steps)
            quartiles = (1e6 * np.quantile(times, (0.25, 0.5, 0.75))).tolist()
            found.append({"drafter": spec, "rows": rows, "microseconds": quartiles})
            print(f"{spec}, {rows} rows: {quartiles[1]:.0f} us ({quartiles[0]:.0f} to {quartiles[2]:.0f})")
    emit(given, {"proposals": found})
    return 0


def proposals(spec: str, rows: int, prompt: int, steps: int) -> list[float]:
    """Seconds of each proposal for so many rows whose text grows."""
    rng = np.random.default_rng(0)
    longest = prompt + 9 * steps
    text = np.stack([_phrases(rng, longest) for _ in range(rows)])
    proposer = getattr(vllm, spec)(_config(longest + 1))
    counts = np.full(rows, prompt + 1, np.int32)
    gained = [[int(token)] for token in text[:, prompt]]
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        drafts: Sequence[list[int]] = proposer.propose(gained, counts, text)
        times.append(time.perf_counter() - begun)
        for i, draft in enumerate(drafts):
            ahead = text[i, counts[i] : counts[i] + len(draft)]
            good = int((np.array(draft, np.int32)[: len(ahead)] == ahead).cumprod().sum())
            gained[i] = text[i, counts[i] : counts[i] + good + 1].tolist()
            counts[i] += len(gained[i])
    proposer.close()
    return times


def _phrases(rng: np.random.Generator, length: int) -> I32:
    """Tokens int32 [length]: new ones, and phrases of 12 from anywhere before."""
    text = rng.integers(0, VOCAB, length).astype(np.int32)
    at = 64
    while at + 12 <= length:
        start = int(rng.integers(0, at - 12))
        text[at : at + 12] = text[start : start + 12]
        at += 12 + int(rng.integers(0, 8))
    return text


def _config(longest: int) -> Any:
    """What vLLM's config says of these."""
    return SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB, max_model_len=longest),
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        additional_config={},
    )
