"""The two demo models, whose tokenizers have nothing in common, draft for each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from tests.driving import finished

PAIRS = [("demo", "demo-gemma"), ("demo-gemma", "demo")]
PROSE = "Once upon a time, there was a king who lived in a big castle with his"
PROMPTS = [
    PROSE,
    "Écris une phrase sur le café à Zürich 😀👍🏽 :",
    "日本の首都はどこですか。答え：",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
    "1234567890, 1234567891, 12345",
    "<|im_start|>user\n<bos>\u2581\u00a0  x",
]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)


@pytest.fixture(scope="module", params=PAIRS, ids=" from ".join)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    target, draft = request.param
    with Engine.load(target, drafter=f"model:{draft},size=4", threads=1, max_length=512, prefix_rows=0) as loaded:
        yield loaded


def tokens(results: object) -> list[list[int]]:
    return [list(result.token_ids) for result in results]  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_ragged_batch_says_what_plain_decoding_says(engine: Engine, params: SamplingParams) -> None:
    plain = tokens(engine.generate_many(PROMPTS, params, raw=True, drafter=False))
    requests = [engine.add(prompt, params, raw=True) for prompt in PROMPTS]
    found = finished(engine)
    assert tokens(found[request, 0] for request in requests) == plain
    assert found[requests[0], 0].stats.accepted > 0
    assert sum(result.stats.accepted for result in found.values()) > 20
    alone = engine.generate(PROSE, params, raw=True)
    assert list(alone.token_ids) == plain[0]
    assert alone.stats.drafted == found[requests[0], 0].stats.drafted


def test_samples_of_one_prompt_and_a_cancelled_request(engine: Engine) -> None:
    twice = SamplingParams(max_tokens=16, temperature=0.8, seed=5, n=2)
    plain = tokens(engine.generate_many([PROSE], twice, raw=True, drafter=False))
    cancelled = engine.add(PROMPTS[1], GREEDY, raw=True)
    request = engine.add(PROSE, twice, raw=True)
    found = {}
    for step in range(100):
        for delta in engine.step():
            if delta.result is not None:
                found[delta.request, delta.sample] = delta.result
        engine.check()
        if step == 3:
            engine.cancel(cancelled)
            engine.check()
        if engine.idle:
            break
    assert tokens(found[key] for key in sorted(found)) == plain
    assert set(found) == {(request, 0), (request, 1)}


def test_chat(engine: Engine) -> None:
    """Special tokens of a chat template mean nothing to the other model, and stand in nobody's way."""
    params = SamplingParams(max_tokens=24)
    plain = engine.generate("Say hello to Anna.", params, drafter=False)
    found = engine.generate("Say hello to Anna.", params)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted > 0


def test_a_composition(engine: Engine) -> None:
    from outpace.drafters.composed import ComposedDrafter
    from outpace.drafters.lookup.ngram import NgramDrafter

    prompt = "the cat, the dog, the cat, the dog, the cat,"
    plain = engine.generate(prompt, GREEDY, raw=True, drafter=False)
    composed = Engine(
        engine.model, engine.tokenizer, drafter=ComposedDrafter([NgramDrafter(), engine.drafter]), size=6, prefix_rows=0
    )
    found = composed.generate(prompt, GREEDY, raw=True)
    composed.check()
    assert found.token_ids == plain.token_ids
    assert engine.drafter.name in composed.drafter.name
    assert np.sum(list(found.stats.accepted_by.values())) > 4
