"""Logit rules: against slow references, against transformers' own processors, and immutable along branches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from outpace.arrays import F32
from outpace.errors import ParameterError
from outpace.exact.noise import Noise
from outpace.exact.rules import Penalties, rules_for
from outpace.exact.sampling import Chooser
from outpace.params import SamplingParams

V = 9
tokens = st.lists(st.integers(0, V - 1), max_size=12)
logit_rows = st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-np.inf)), min_size=V, max_size=V).map(
    lambda x: np.array(x, np.float32)
)


def after(params: SamplingParams, prompt: list[int], output: list[int], logits: F32) -> F32:
    """logits' after ``prompt`` and ``output``, one token at a time."""
    chooser = Chooser.start(params, Noise(0), rules_for(params, V), np.array(prompt, np.int32))
    for token in output:
        chooser = chooser.advance(token)
    return chooser.apply_rules(logits)


def slow_penalties(params: SamplingParams, prompt: list[int], output: list[int], logits: F32) -> list[float]:
    expected = [float(x) for x in logits]
    for token in range(V):
        if token in prompt or token in output:
            repetition = params.repetition_penalty
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        count = output.count(token)
        expected[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return expected


@settings(deadline=None, max_examples=150)
@given(
    tokens.filter(len),
    tokens,
    logit_rows,
    st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    st.sampled_from([0.0, 0.7, -1.0]),
    st.sampled_from([0.0, 0.4, -0.3]),
)
def test_penalties_follow_their_definition(
    prompt: list[int], output: list[int], logits: F32, repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    before = logits.copy()
    found = after(params, prompt, output, logits)
    np.testing.assert_allclose(found, slow_penalties(params, prompt, output, logits), rtol=1e-5, atol=1e-5)
    assert (logits == before).all()


@settings(deadline=None, max_examples=60)
@given(tokens.filter(len), tokens, logit_rows, st.sampled_from([0.8, 1.3, 2.0]))
def test_the_repetition_penalty_is_transformers_own(
    prompt: list[int], output: list[int], logits: F32, penalty: float
) -> None:
    theirs = SamplingParams(rules=[RepetitionPenaltyLogitsProcessor(penalty)])
    ours = SamplingParams(repetition_penalty=penalty)
    assert (after(ours, prompt, output, logits) == after(theirs, prompt, output, logits)).all()


@pytest.mark.parametrize(
    "processor",
    [
        NoRepeatNGramLogitsProcessor(2),
        SuppressTokensLogitsProcessor([0, 8], device="cpu"),
        MinNewTokensLengthLogitsProcessor(6, 2, 5, device="cpu"),
    ],
    ids=["no repeat", "suppress", "at least"],
)
def test_foreign_processors_see_the_tokens_so_far(processor: Any) -> None:
    prompt, logits = [4, 2, 4, 1, 4, 4], np.ones(V, np.float32)
    params = SamplingParams(rules=[processor])
    forbidden = []
    for output in ([], [3], [4, 1], [1, 4]):
        expected = processor(torch.tensor([[*prompt, *output]]), torch.ones(1, V))[0].numpy()
        found = after(params, prompt, output, logits)
        assert (found == expected).all(), (output, found, expected)
        forbidden.append((found == -np.inf).sum())
    assert max(forbidden) > 0, "the processor did nothing, so nothing was tested"


def test_bias_and_masks() -> None:
    logits = np.arange(V, dtype=np.float32)
    biased = after(SamplingParams(logit_bias={7: -3.5, 0: 2.0, 4: -np.inf}), [1], [], logits)
    assert biased.tolist() == [2, 1, 2, 3, -np.inf, 5, 6, 3.5, 8]
    masked = after(SamplingParams(allowed_tokens=[5, 2, 5]), [1], [], logits)
    assert np.flatnonzero(np.isfinite(masked)).tolist() == [2, 5]
    assert masked[[2, 5]].tolist() == [2, 5]


def test_rules_apply_in_the_documented_order() -> None:
    """Penalties before the bias: a penalised logit is not the biased one. Foreign rules see what is left."""
    logits = np.full(V, 2.0, np.float32)
    params = SamplingParams(
        repetition_penalty=2.0,
        logit_bias={1: 1.0},
        allowed_tokens=[1, 2],
        rules=[SuppressTokensLogitsProcessor([2], device="cpu")],
    )
    found = after(params, [1], [], logits)
    assert found[1] == 2.0  # 2 / 2 + 1, not (2 + 1) / 2
    assert np.flatnonzero(np.isfinite(found)).tolist() == [1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
        SamplingParams(rules=[NoRepeatNGramLogitsProcessor(1)]),
        SamplingParams(logit_bias={1: 1.0}, allowed_tokens=[1, 2, 3], frequency_penalty=0.5),
    ],
    ids=["penalties", "foreign", "mixed"],
)
def test_branches_never_see_each_other(params: SamplingParams) -> None:
    """A tree's siblings share their parent's state: what one does must not reach the others, in any order."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, V).astype(np.float32)
    prompt = np.array([0, 1], np.int32)
    nodes = {(): Chooser.start(params, Noise(0), rules_for(params, V), prompt)}
    for _ in range(60):
        parent = sorted(nodes)[rng.integers(len(nodes))]
        token = int(rng.integers(V))
        nodes[*parent, token] = nodes[parent].advance(token)
        nodes[parent].apply_rules(logits)
    for path, chooser in nodes.items():
        assert (chooser.apply_rules(logits) == after(params, prompt.tolist(), list(path), logits)).all()


def test_what_does_nothing_costs_nothing() -> None:
    assert rules_for(SamplingParams(), V) == ()
    assert len(rules_for(SamplingParams(presence_penalty=0.1), V)) == 1
    assert Penalties() == Penalties(1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={V: 1.0}), "logit_bias"),
        (SamplingParams(allowed_tokens=[0, V]), "allowed_tokens"),
        (SamplingParams(rules=[object()]), "LogitsProcessor"),  # type: ignore[list-item]
    ],
)
def test_rules_that_do_not_fit_the_model_are_refused(params: SamplingParams, name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        rules_for(params, V)
