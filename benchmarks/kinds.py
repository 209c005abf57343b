"""Drafted decoding against plain decoding on a small random model of every GGUF architecture: seconds, no download.

A line each: answers whose tokens are plain decoding's, of all that were asked, how many drafted tokens were accepted,
and how many of prompts were reused. Greedy, sampled, under a grammar, three samples of one prompt, resumed, and behind
prompts whose beginnings are still there; with every drafter that needs no training. Where transformers has the file's
class, a line of `outpace.patch`, too: greedy tokens against the model's own `generate`, sampled ones against those of a
patch without drafts, each prompt alone and all as a padded batch. Exit code 1 when a token differs.

Example: ./scripts/prove kinds
One of them, more seeds: ./scripts/prove kinds --only gemma4 --seeds 20
As CI does: ./scripts/prove kinds --short
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import outpace
from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.engine.request import Size
from outpace.errors import Argument, ModelError, ParameterError
from outpace.models import families
from outpace.models.base import Model
from outpace.models.families import FAMILIES
from outpace.models.load import load
from outpace.models.options import LoadOptions
from outpace.models.weights.gguf import GGUFFile
from outpace.params import SamplingParams
from outpace.text.grammar import Grammars
from outpace.text.tokenizer import Tokenizer
from tests.native.native_helpers import Tiny

DRAFTERS = ("ngram", "suffix", "recycle", "lookahead", "suffix+recycle", "layers:1", "model:")
SIZES: tuple[Size, ...] = (3, "auto")
SHORT = ("suffix+recycle", "layers:1", "model:")
PATCHED = ("suffix", "recycle", "layers:1")
TOKENS, SHORTER = 48, 16  # of an answer
FEW = tuple(range(7))  # tokens that answers are made of, so that drafts are often right
GRAMMAR = "([!-#]{1,3}[$%ab])+"  # of texts of these tokens, and a few others
ROWS = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    known = sorted(_architectures())
    parser.add_argument("--only", action="append", choices=known, metavar="ARCHITECTURE", help=", ".join(known))
    parser.add_argument("--seeds", type=int, default=2, help="random texts and samplings")
    parser.add_argument("--short", action="store_true", help="one size, fewer drafters, shorter answers")
    parser.add_argument("--threads", type=int, default=2)


def _architectures() -> list[str]:
    return [family.gguf for family in FAMILIES if family.gguf is not None]


def run(given: argparse.Namespace) -> int:
    if given.seeds < 1:
        raise ParameterError(Argument("seeds", given.seeds), " is no number of texts: give 1 or more")
    different = 0
    print(f"{'architecture':<16} {'the same':>12} {'accepted':>9} {'reused':>7}")
    with Tiny() as tiny:
        for architecture in given.only or _architectures():
            total = _of(architecture, tiny, given)
            same, answers, accepted, reused = total.tolist()
            print(f"{architecture:<16} {f'{same} of {answers}':>12} {accepted:>9} {reused:>7}", flush=True)
            different += answers - same
            if (found := _patched(architecture, tiny, given)) is not None:
                same, answers, accepted = found
                print(f"{'  patched':<16} {f'{same} of {answers}':>12} {accepted:>9}", flush=True)
                different += answers - same
    print(f"{different} differences")
    return 1 if different else 0


def _of(architecture: str, tiny: Tiny, given: argparse.Namespace) -> npt.NDArray[np.int64]:
    """What ``_compared`` counts, in all, of one architecture."""
    options = LoadOptions(backend="native", threads=given.threads)
    path, draft = (str(tiny.path("Q8_0", each, tokenizer=1)) for each in (architecture, "llama"))
    specs: tuple[str, ...] = SHORT if given.short else DRAFTERS
    sizes = SIZES[:1] if given.short else SIZES
    model, tokenizer = load(path, options)
    if model.kv.recurrent:  # whose states cannot go back further than a step
        specs = tuple(spec for spec in specs if not spec.startswith("layers"))
    asked = _asked(model, tokenizer, given.seeds, SHORTER if given.short else TOKENS)
    with Engine(model, tokenizer, max_rows=1, prefix_rows=0) as alone:
        plain = [_answers(alone, [each]) for each in asked]
    total = np.zeros(4, np.int64)
    for spec, size in product(specs, sizes):
        model, _ = load(path, options)
        drafter = build(parse(spec + draft if spec == "model:" else spec), DraftContext(model, tokenizer, options, 8))
        with Engine(model, tokenizer, drafter=drafter, size=size, max_rows=ROWS, prefill_chunk=16) as engine:
            total += _compared(engine, asked, plain)
    return total


def _patched(architecture: str, tiny: Tiny, given: argparse.Namespace) -> tuple[int, int, int] | None:
    """(answers that are those of plain decoding, answers, accepted tokens) of a patched model of the file; None where
    the file's class is not built here."""
    import torch

    from outpace.models.torch import gguf

    file = GGUFFile.open(tiny.path("Q8_0", architecture))
    family = families.of_gguf(architecture)
    if family is None or family.mixture is not None or family.modules or family.recurrent is not None:
        return None
    module = gguf.build(file, torch.float32, torch.device("cpu")).eval()
    vocab = int(module.config.vocab_size)
    usual = {
        "max_new_tokens": SHORTER if given.short else TOKENS, "pad_token_id": 0,
        "suppress_tokens": list(range(len(FEW), vocab)),
    }  # fmt: skip

    def answers(sampled: bool, **more: int) -> list[list[int]]:
        found = []
        for seed in range(given.seeds):
            rng = np.random.default_rng(seed)
            piece = rng.integers(1, len(FEW), 5)
            rows = [np.tile(piece, 4), rng.integers(1, vocab, 20), np.pad(np.tile(piece, 2), (10, 0))]
            for batch in (rows[:1], rows[1:2], rows):
                torch.manual_seed(seed)
                ids = torch.from_numpy(np.stack(batch))
                made = module.generate(ids, attention_mask=(ids > 0).long(), do_sample=sampled, **usual, **more)
                found += made[:, ids.shape[1] :].tolist()
        return found

    expected = [answers(False)]
    with outpace.patch(module, drafter="none"):
        expected.append(answers(True))
    same = total = accepted = 0
    for spec, size in product(PATCHED[:1] if given.short else PATCHED, SIZES[:1] if given.short else SIZES):
        with outpace.patch(module, drafter=spec, size=size) as patched:
            found = [answers(False), answers(True), answers(False, prompt_lookup_num_tokens=3)]
            for each, plain in zip(found, [*expected, expected[0]], strict=True):
                same, total = same + sum(a == b for a, b in zip(each, plain, strict=True)), total + len(plain)
            accepted += patched.stats.total.accepted
            if patched.stats.own:
                raise ModelError(f"{architecture}: undrafted: {', '.join(patched.stats.own)}")
    return same, total, accepted


class Asked(NamedTuple):
    prompt: list[int]
    params: SamplingParams
    resume: tuple[int, ...] = ()


def _asked(model: Model, tokenizer: Tokenizer | None, seeds: int, tokens: int) -> list[Asked]:
    """Of each seed: greedy and sampled answers to three prompts, three samples of one, and two under a grammar."""
    assert tokenizer is not None
    grammar = Grammars(tokenizer, model.info.vocab_size, model.info.eos_ids).regex(GRAMMAR)
    asked = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        piece = rng.integers(0, len(FEW), 5).tolist()
        usual = SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, allowed_tokens=FEW)
        prompts = (piece * 8, rng.integers(0, model.info.vocab_size, 40).tolist(), piece)
        for i, prompt in enumerate(prompts):
            asked.append(Asked(prompt, usual.with_(temperature=0.8 * ((seed + i) % 2))))
        asked.append(Asked(prompts[0], usual.with_(temperature=0.8, n=3)))
        ruled = SamplingParams(max_tokens=tokens, seed=seed, rules=[grammar])
        asked += [Asked(piece * 3, ruled.with_(temperature=temperature)) for temperature in (0.0, 0.8)]
    return asked


def _answers(engine: Engine, asked: Sequence[Asked]) -> list[tuple[int, ...]]:
    """The tokens of every answer, requests and their samples in order."""
    for prompt, params, resume in asked:
        engine.add(prompt, params, resume=list(resume) or None)
    found = {}
    while not engine.idle:
        for delta in engine.step():
            if delta.result is not None:
                found[delta.request, delta.sample] = tuple(delta.result.token_ids)
    engine.check()
    return [tokens for _, tokens in sorted(found.items())]


def _compared(engine: Engine, asked: list[Asked], plain: list[list[tuple[int, ...]]]) -> tuple[int, int, int, int]:
    """(answers that are plain decoding's, answers, accepted tokens, reused ones): all at once, then again, those with
    one sample resumed amid their answers, behind prompts that the engine still has."""
    expected = [tokens for answers in plain for tokens in answers]
    found = _answers(engine, asked)
    halves = [
        each._replace(resume=answers[0][: len(answers[0]) // 2]) if len(answers) == 1 else each
        for each, answers in zip(asked, plain, strict=True)
    ]
    found += _answers(engine, halves)
    same = sum(a == b for a, b in zip(found, expected * 2, strict=True))
    return same, len(found), engine.stats.accepted, engine.stats.reused_tokens
