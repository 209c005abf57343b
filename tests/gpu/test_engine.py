"""Speculative against plain decoding on a card: identical in float32 up to near-ties, and counted in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext
from outpace.drafters.learned.eagle import EagleDrafter
from outpace.drafters.learned.torch_eagle import TorchEagle
from outpace.drafters.registry import build, parse
from outpace.engine.results import Result
from outpace.exact.noise import Noise
from outpace.measure.compare import compare_tokens
from outpace.models.base import Model
from outpace.models.options import LoadOptions
from outpace.models.text.tokenizer import Tokenizer
from tests import eagles

PROMPTS = [
    "Count from one to twenty, separated by commas.",
    "Repeat after me, three times: the cat sat on the mat, and the dog sat on the cat.",
    "Write a Python function that reverses a list, and one that reverses a string.",
    "Why is the sky blue?",
    "Translate into French: good morning, good evening, good night.",
]
KINDS = {
    "greedy": SamplingParams(max_tokens=48),
    "sampled": SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=11),
}


def differences(
    engine: Engine, prompts: list[Any], params: SamplingParams, plain: list[Result], other: list[Result]
) -> list[Any]:
    assert all(result.finish_reason in ("stop", "length") for result in (*plain, *other))
    return [
        compare_tokens(engine, prompt, params, Noise(params.seed or 0), list(a.token_ids), list(b.token_ids))
        for prompt, a, b in zip(prompts, plain, other, strict=True)
    ]


@pytest.fixture(scope="module", params=KINDS)
def plain(
    request: pytest.FixtureRequest, demo: tuple[Model, Tokenizer]
) -> tuple[SamplingParams, list[Any], list[Result]]:
    engine = Engine(*demo, prefix_rows=0)  # several engines share the model, so none keeps rows of it
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    params = KINDS[request.param]
    return params, prompts, [engine.generate(prompt, params) for prompt in prompts]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "batch"])
@pytest.mark.parametrize(
    ("drafter", "size"), [("ngram", 4), ("suffix", 12), ("ngram+suffix", 8), ("layers:10", 3), ("ngram", "auto")]
)
def test_float32_is_identical_up_to_near_ties(
    demo: tuple[Model, Tokenizer],
    plain: tuple[SamplingParams, list[Any], list[Result]],
    drafter: str,
    size: Any,
    together: bool,
    record_property: Any,
) -> None:
    model, tokenizer = demo
    params, prompts, expected = plain
    built = build(parse(drafter), DraftContext(model, tokenizer, LoadOptions(), 12))
    engine = Engine(model, tokenizer, drafter=built, size=size, prefix_rows=0)
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    found = [result for group in groups for result in engine.generate_many(group, params)]
    engine.check()
    parted = [d for d in differences(engine, prompts, params, expected, found) if d is not None]
    record_property("near_ties", len(parted))
    assert not [str(d) for d in parted if not d.near_tie]
    assert size == "auto" or sum(result.stats.accepted for result in found) > 0


def test_a_drafter_that_reads_hidden_states_on_the_card(demo: tuple[Model, Tokenizer]) -> None:
    """Of random weights: what it drafts means little, what is said is the target's."""
    model, tokenizer = demo
    params = SamplingParams(max_tokens=16)
    plain = Engine(model, tokenizer, prefix_rows=0)
    checkpoint = eagles.random(model, range(0, model.info.vocab_size, 16), (1, 14, 26), fc_norm=True)
    drafter = EagleDrafter(TorchEagle(model, checkpoint), (1, 14, 26), "eagle", model.info.vocab_size)
    engine = Engine(model, tokenizer, drafter=drafter, size=3, prefix_rows=0)
    for prompt in PROMPTS[:2]:
        expected, found = plain.generate(prompt, params), engine.generate(prompt, params)
        engine.check()
        its = [differences(plain, [plain.encode(prompt)], params, [expected], [found])[0]]
        assert all(d is None or d.near_tie for d in its)
        assert found.stats.drafted > 0
    drafter.close()
