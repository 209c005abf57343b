"""Trees on the demo model: the tokens of plain decoding, greedy and sampled."""

from __future__ import annotations

import pytest

from outpace import SamplingParams
from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.engine.engine import Engine
from outpace.models.load import load
from outpace.models.options import LoadOptions

PROMPTS = ["Repeat three times: the quick brown fox jumps over the lazy dog.", "Count from one to ten, twice."]


def test_every_tree_drafter_says_what_plain_decoding_says_natively() -> None:
    options = LoadOptions(backend="native")
    model, tokenizer = load("demo", options)
    sampled = SamplingParams(max_tokens=40, temperature=0.8, seed=1)
    greedy = SamplingParams(max_tokens=40)
    with Engine(model, tokenizer, size=7, prefix_rows=0) as plain:
        expected = [plain.generate_many(PROMPTS, params) for params in (greedy, sampled)]
        for spec in ("ngram:candidates=3", "suffix", "suffix:history=1", "ngram+suffix"):
            drafter = build(parse(spec), DraftContext(model, tokenizer, options, 7))
            engine = Engine(model, tokenizer, drafter=drafter, size=7, prefix_rows=0)
            for params, results in zip((greedy, sampled), expected, strict=True):
                for prompt, result in zip(PROMPTS, results, strict=True):
                    found = engine.generate(prompt, params)
                    assert found.token_ids == result.token_ids, spec
                    engine.check()
            assert engine.stats.accepted > 0


@pytest.mark.slow
def test_a_tree_on_the_transformers_backend() -> None:
    options = LoadOptions(backend="transformers", device="cpu", dtype="float32")
    model, tokenizer = load("demo", options)
    params = SamplingParams(max_tokens=12)
    drafter = build(parse("ngram+suffix"), DraftContext(model, tokenizer, options, 7))
    with Engine(model, tokenizer, drafter=drafter, size=7) as engine:
        expected = engine.generate(PROMPTS[0], params, drafter=False)
        found = engine.generate(PROMPTS[0], params)
        engine.check()
        assert found.token_ids == expected.token_ids
        assert found.stats.steps < expected.stats.steps
