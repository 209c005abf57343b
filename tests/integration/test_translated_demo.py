"""The two demo models, whose tokenizers have nothing in common, draft for each other."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_chat(engine: Engine) -> None:
    """Special tokens of a chat template mean nothing to the other model, and stand in nobody's way."""
    params = SamplingParams(max_tokens=24)
    plain = engine.generate("Say hello to Anna.", params, drafter=False)
    found = engine.generate("Say hello to Anna.", params)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted > 0
