"""Every sampling parameter on the demo model, plain and drafted: the same tokens, text and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from outpace import Engine, SamplingParams
from outpace.engine.results import Result
from outpace.measure.compare import compare, first_difference

PROMPT = "Repeat three times: The cat sat on the mat, and the dog lay by the door. Then count: one, two, three."
TOKENS = 16

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "filters": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "bias": {"temperature": 1.0, "top_p": 0.8, "logit_bias": {28: 2.0, 30: -np.inf}},
    "foreign rule": {"rules": [NoRepeatNGramLogitsProcessor(3)]},
    "samples": {"temperature": 1.0, "n": 2, "min_p": 0.05},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One thread: two spin against each other when the machine is busy. ``threads`` is torch's, so it is restored."""
    threads = torch.get_num_threads()
    with Engine.load(
        "demo", drafter="ngram:size=7", dtype="float32", backend="transformers", max_length=512, threads=1
    ) as engine:
        yield engine
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(engine: Engine) -> dict[str, tuple[list[Result], list[Result]]]:
    """All cases at once, plain and drafted, in one ragged batch."""
    names, both = list(CASES), []
    each = [SamplingParams(seed=11, max_tokens=TOKENS, top_logprobs=3, **CASES[name]) for name in names]
    for drafter in (False, True):
        found = iter(engine.generate_many([PROMPT] * len(names), each, drafter=drafter))
        both.append([[next(found) for _ in range(params.n)] for params in each])
        engine.check()
    return {name: (plain, drafted) for name, plain, drafted in zip(names, *both, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_drafting_changes_nothing(
    engine: Engine, results: dict[str, tuple[list[Result], list[Result]]], name: str
) -> None:
    prompt = engine.encode(PROMPT)
    for plain, drafted in zip(*results[name], strict=True):
        params = SamplingParams(seed=11, max_tokens=TOKENS, top_logprobs=3, **CASES[name])
        difference = compare(engine, prompt, params, plain, drafted)
        assert difference is None or difference.near_tie, str(difference)
        same = first_difference(plain.token_ids, drafted.token_ids) or len(plain.token_ids)
        for a, b in zip(plain.logprobs[:same], drafted.logprobs[:same], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            np.testing.assert_allclose([its.logprob for its in a.top], [its.logprob for its in b.top], atol=1e-3)
    samples = {r.token_ids for r in results[name][0]}
    assert len(samples) == SamplingParams(**CASES[name]).n, "samples of one request must differ"


def test_drafts_were_accepted(results: dict[str, tuple[list[Result], list[Result]]]) -> None:
    drafted = [r for _, rs in results.values() for r in rs]
    assert sum(r.stats.accepted for r in drafted) > 5
    assert all(r.stats.drafted == 0 for rs, _ in results.values() for r in rs)


def test_logprobs_are_the_models_own(engine: Engine, results: dict[str, tuple[list[Result], list[Result]]]) -> None:
    """Raw: neither the rules nor the temperature show. Compared with the module's own forward over the whole text."""
    module = engine.model._module  # type: ignore[attr-defined]
    prompt = engine.encode(PROMPT)
    for name in ("greedy", "penalties", "bias"):
        result = results[name][1][0]
        ids = torch.tensor([[*prompt.tolist(), *result.token_ids]])
        reference = _reference(module, ids)[len(prompt) - 1 : -1]
        for i, found in enumerate(result.logprobs):
            assert found.token == result.token_ids[i]
            assert found.logprob == pytest.approx(float(reference[i, found.token]), abs=2e-3)
            best = torch.topk(reference[i], 3).values.tolist()
            np.testing.assert_allclose([its.logprob for its in found.top], best, atol=2e-3)


def _reference(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-softmax [S, V] by transformers alone: a copy of the configuration's model with its own attention."""
    from transformers import AutoModelForCausalLM

    config = type(module.config)(**{**module.config.to_dict(), "attn_implementation": "eager"})
    config._attn_implementation = "eager"
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    plain.load_state_dict(module.state_dict())
    with torch.inference_mode():
        return torch.log_softmax(plain(input_ids=ids, use_cache=False).logits[0].double(), -1)
