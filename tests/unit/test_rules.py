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

from outpace.common.arrays import F32
from outpace.errors import ParameterError, RuleError
from outpace.exact.masks import unpacked
from outpace.exact.noise import Noise
from outpace.exact.rules import BadWords, MinTokens, rules_for
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


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=5), st.data())
def test_bad_words_forbid_what_would_complete_them_and_nothing_else(bad: list[list[int]], data: st.DataObject) -> None:
    output = data.draw(st.lists(st.integers(0, 4), max_size=8))
    expected = {word[-1] for word in bad if len(word) == 1 or output[1 - len(word) :] == word[:-1]}
    logits = np.zeros(40, np.float32)
    params = SamplingParams(bad_words=bad)
    chooser = Chooser.start(params, Noise(0), rules_for(params, 40), np.array([bad[0][0]], np.int32))
    for token in output:
        chooser = chooser.advance(token)
    found = chooser.apply_rules(logits)
    assert set(np.flatnonzero(found == -np.inf).tolist()) == expected
    mask = chooser.mask()
    assert mask is not None
    assert (unpacked(mask, 40) == np.isfinite(found)).all()
    applied = logits.copy()
    chooser.rules[0].apply(chooser.states[0], applied)
    assert (applied == found).all()


def test_bad_words_as_texts_count_with_and_without_a_space_before_them() -> None:
    pieces = {"ab": [1], " ab": [2], "cd": [3, 4], " cd": [5, 4], "\n ef": [6], "ef": [7], " ef": [8]}
    params = SamplingParams(bad_words=["ab", " cd", "\n ef", [0, 1]])
    (rule,) = rules_for(params, V, pieces.__getitem__)
    assert isinstance(rule, BadWords)
    state = rule.start(np.array([3], np.int32))
    assert rule.forbidden(state).tolist() == [1, 2, 6, 7, 8]
    assert rule.forbidden(rule.advance(state, 3)).tolist() == rule.forbidden(rule.advance(state, 5)).tolist()
    assert rule.forbidden(rule.advance(state, 3)).tolist() == [1, 2, 4, 6, 7, 8]
    with pytest.raises(ParameterError, match="bad_words has the text 'ab', and there is no tokenizer"):
        rules_for(params, V)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_no_run_comes_twice_as_transformers_has_it(n: int) -> None:
    theirs = NoRepeatNGramLogitsProcessor(n)
    (rule,) = rules_for(SamplingParams(no_repeat_ngram_size=n), V)
    rng = np.random.default_rng(n)
    for length in rng.integers(1, 30, 100):
        text = rng.integers(0, 5, length).astype(np.int32)
        state = rule.start(text[: length // 2])
        for token in text[length // 2 :]:
            state = rule.advance(state, int(token))
        expected = theirs(torch.from_numpy(text[None]).long(), torch.zeros(1, V))[0].isneginf().nonzero()[:, 0]
        assert rule.forbidden(state).tolist() == expected.tolist()


@pytest.mark.parametrize(("ignore_eos", "forbidden"), [(False, [2, 5, 8]), (True, [5])])
def test_no_end_comes_before_min_tokens(ignore_eos: bool, forbidden: list[int]) -> None:
    params = SamplingParams(min_tokens=3, stop_ids=[5], ignore_eos=ignore_eos)
    (rule,) = rules_for(params, V, eos_ids=(8, 2, 99))
    assert isinstance(rule, MinTokens)
    chooser = Chooser.start(params, Noise(0), (rule,), np.array([1], np.int32))
    for n in range(6):
        found = chooser.apply_rules(np.ones(V, np.float32))
        applied = np.ones(V, np.float32)
        rule.apply(chooser.states[0], applied)
        assert (found == applied).all()
        assert np.flatnonzero(found == -np.inf).tolist() == (forbidden if n < 3 else [])
        chooser = chooser.advance(4)


def test_a_foreign_processor_that_fails_is_named() -> None:
    class Wrong:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        def __call__(self, ids: Any, scores: Any) -> Any:
            if isinstance(self._answer, BaseException):
                raise self._answer
            return self._answer

    for answer, says in (
        (ZeroDivisionError("oops"), "Wrong raised ZeroDivisionError: oops"),
        (None, "Wrong raised TypeError"),
        (torch.zeros(1, V + 1), "Wrong raised ValueError"),
    ):
        with pytest.raises(RuleError, match=says) as caught:
            after(SamplingParams(rules=[Wrong(answer)]), [1], [], np.zeros(V, np.float32))
        assert caught.value.__cause__ is not None
    with pytest.raises(KeyboardInterrupt):
        after(SamplingParams(rules=[Wrong(KeyboardInterrupt())]), [1], [], np.zeros(V, np.float32))


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={V: 1.0}), "logit_bias"),
        (SamplingParams(allowed_tokens=[0, V]), "allowed_tokens"),
        (SamplingParams(bad_words=[[0, V]]), "bad_words has token id 9"),
        (SamplingParams(rules=[object()]), "LogitsProcessor"),  # type: ignore[list-item]
    ],
)
def test_rules_that_do_not_fit_the_model_are_refused(params: SamplingParams, name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        rules_for(params, V)
