"""Drafted decoding against plain decoding on a small random model of every GGUF architecture: seconds, no download.

A line each: requests whose tokens are plain decoding's, of all that were asked, and how many drafted tokens were
accepted. Greedy and sampled, alone and together, with every drafter that needs no training. Exit code 1 when a token
differs.

Example: ./scripts/prove kinds
One of them, more seeds: ./scripts/prove kinds --only gemma4 --seeds 20
"""

from __future__ import annotations

import argparse

import numpy as np

from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.engine.request import Size
from outpace.errors import Argument, ParameterError
from outpace.models.families import FAMILIES
from outpace.models.native.model import NativeModel, load_native
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams
from tests.native.native_helpers import Tiny

DRAFTERS = ("ngram", "suffix", "recycle", "lookahead", "suffix+recycle", "layers:1")
SIZES: tuple[Size, ...] = (3, "auto")
TOKENS = 48  # of an answer
FEW = tuple(range(7))  # tokens that answers are made of, so that drafts are often right


def arguments(parser: argparse.ArgumentParser) -> None:
    known = sorted(_architectures())
    parser.add_argument("--only", action="append", choices=known, metavar="ARCHITECTURE", help=", ".join(known))
    parser.add_argument("--seeds", type=int, default=2, help="random texts and samplings")
    parser.add_argument("--threads", type=int, default=2)


def _architectures() -> list[str]:
    return [family.gguf for family in FAMILIES if family.gguf is not None]


def run(given: argparse.Namespace) -> int:
    if given.seeds < 1:
        raise ParameterError(Argument("seeds", given.seeds), " is no number of texts: give 1 or more")
    different = 0
    print(f"{'architecture':<16} {'the same':>12} {'accepted':>9}")
    with Tiny() as tiny:
        for architecture in given.only or _architectures():
            model = load_native(tiny.path("Q8_0", architecture), threads=given.threads)
            same, asked, accepted = _compared(model, given.seeds)
            model.close()
            print(f"{architecture:<16} {f'{same} of {asked}':>12} {accepted:>9}", flush=True)
            different += asked - same
    print(f"{different} differences")
    return 1 if different else 0


def _compared(model: NativeModel, seeds: int) -> tuple[int, int, int]:
    """(requests that are plain decoding's, requests, accepted tokens) of one model."""
    prompts, params = [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        piece = rng.integers(0, len(FEW), 5).tolist()
        for prompt in (piece * 8, rng.integers(0, model.info.vocab_size, 40).tolist(), piece):
            prompts.append(prompt)
            usual = SamplingParams(max_tokens=TOKENS, seed=seed, ignore_eos=True, allowed_tokens=FEW)
            params.append(usual.with_(temperature=0.8 * (len(prompts) % 2)))
    alone = Engine(model, max_rows=1, prefix_rows=0)  # left open: it would close the model
    plain = [list(result.token_ids) for result in alone.generate_many(prompts, params)]
    same = asked = accepted = 0
    for spec in DRAFTERS:
        if spec.startswith("layers") and model.kv.recurrent:
            continue  # refused: those layers cannot go back further than a step
        for size in SIZES:
            drafter = build(parse(spec), DraftContext(model, None, LoadOptions(), 8))
            engine = Engine(model, drafter=drafter, size=size, max_rows=4, prefill_chunk=16, prefix_rows=0)
            results = engine.generate_many(prompts, params)
            engine.check()
            same += sum(list(r.token_ids) == first for r, first in zip(results, plain, strict=True))
            asked += len(results)
            accepted += sum(result.stats.accepted for result in results)
    return same, asked, accepted
