"""The fused choice is sampling.py's choice on the same logits, for every parameter and rule it knows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Foreign, Grammar, Tiny

from outpace import _native
from outpace.errors import NoTokenAllowedError, RuleError
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser, token_logprob
from outpace.models.base import Batch
from outpace.models.native.output import _UNDECIDED, NativeOutput, describe, describe_rules
from outpace.params import SamplingParams


def fused(logits: Any, chooser: Chooser, isa: str = "") -> int:
    edits = describe_rules(chooser)
    assert edits is not None
    result = _native.Result.of(np.ascontiguousarray(logits)[None], np.zeros(1, np.int32), isa)
    token: int = result.choose(0, describe(chooser, edits))
    return token


def chooser_for(params: SamplingParams, vocab: int, seed: int, prompt: list[int], output: list[int]) -> Chooser:
    chooser = Chooser.start(params, Noise(seed, seed % 3), rules_for(params, vocab), np.array(prompt, np.int32))
    for token in output:
        chooser = chooser.advance(token)
    return chooser


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Chooser]:
    vocab = draw(st.sampled_from([1, 3, 15, 16, 17, 63, 64, 65, 100, 1000, 5000]))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    shape = draw(st.sampled_from(["normal", "flat", "ties", "peaked", "wide"]))
    logits = rng.normal(0, {"normal": 2, "flat": 0.01, "ties": 1, "peaked": 1, "wide": 30}[shape], vocab).astype(
        np.float32
    )
    if shape == "ties":
        logits = np.round(logits)
    if shape == "peaked":
        logits[rng.integers(vocab)] += 15
    if draw(st.booleans()):
        logits[rng.random(vocab) < 0.3] = -np.inf
        logits[rng.integers(vocab)] = 1.0
    if draw(st.integers(0, 4)) == 0:
        logits[rng.integers(vocab)] = draw(st.sampled_from([np.nan, np.inf]))
    ids = st.integers(0, vocab - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7, 20.0, 0.001])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, vocab, vocab + 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1, 0.999])),
        top_n_sigma=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-5.0, 3.0]), max_size=4)),
        allowed_tokens=draw(st.none() | st.lists(ids, min_size=1, max_size=20)),
        rules=[Grammar(vocab, draw(st.sampled_from([0.0, 0.02, 0.5, 0.99]))) for _ in range(draw(st.integers(0, 2)))],
    )
    chooser = chooser_for(
        params,
        vocab,
        draw(st.integers(0, 2**64 - 1)),
        draw(st.lists(ids, max_size=10)),
        draw(st.lists(ids, max_size=10)),
    )
    return logits, chooser


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_fused_choices_are_the_references(case: tuple[Any, Chooser], isa: str) -> None:
    logits, chooser = case
    try:
        expected = chooser.choose(logits)
    except NoTokenAllowedError:
        expected = -1
    except FloatingPointError:
        expected = -2
    token = fused(logits, chooser, isa)
    if token != _UNDECIDED:  # the reference then decides, as NativeOutput.choose has it
        assert token == expected
    else:
        assert chooser.params.top_p < 1 or chooser.params.top_n_sigma > 0


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {"top_n_sigma": 1.5}, {"top_k": 200, "top_p": 0.8}]
)
def test_undecided_is_rare(params: dict[str, Any], rules: bool, isa: str, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 3, 49152).astype(np.float32)
    asked = SamplingParams(temperature=0.8, rules=[Grammar(49152, 0.4)] if rules else [], **params)
    chooser = chooser_for(asked, 49152, 5, [], [])
    for index in range(15):
        chooser = chooser.advance(0)
        assert fused(logits, chooser, isa) == chooser.choose(logits), index


def test_nan_and_forbidden(isa: str) -> None:
    sampled = Chooser(SamplingParams(temperature=1.0), Noise(0), 0)
    assert fused(np.full(20, -np.inf, np.float32), sampled, isa) == -1
    assert fused(np.array([0, np.nan, 1], np.float32), sampled, isa) == -2
    with pytest.raises(IndexError, match="not in the vocabulary"):
        fused(np.zeros(3, np.float32), chooser_for(SamplingParams(logit_bias={7: 1.0}), 10, 0, [], []), isa)


def test_a_logit_on_top_n_sigmas_edge_is_left_to_the_reference(isa: str) -> None:
    """Sums are added in another order there: what lies nearer to the edge than their rounding is decided here."""
    logits = np.array([3, 1, -1, -3] * 50, np.float32)  # the deviation is the square root of 5
    for n, decided in ((2 / math.sqrt(5), False), (2 / math.sqrt(5) + 1e-6, True), (2 / math.sqrt(5) - 1e-6, True)):
        chooser = Chooser(SamplingParams(temperature=1.0, top_n_sigma=n), Noise(3), 0)
        token = fused(logits, chooser, isa)
        assert token == (chooser.choose(logits) if decided else _UNDECIDED)
    flat = Chooser(SamplingParams(temperature=1.0, top_n_sigma=1.0), Noise(3), 0)
    assert fused(np.zeros(9, np.float32), flat, isa) == _UNDECIDED  # no deviation: every logit is on the edge


def test_a_chooser_of_another_version_is_refused() -> None:
    described = describe(Chooser(SamplingParams(temperature=1.0), Noise(0), 0), [])
    result = _native.Result.of(np.zeros((1, 9), np.float32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="does not know"):
        result.choose(0, {**described, "top_q": 0.5})
    del described["min_p"]
    with pytest.raises(ValueError, match="min_p is missing"):
        result.choose(0, described)


def test_a_mask_that_forbids_all_or_does_not_fit_is_an_error() -> None:
    output = NativeOutput(_native.Result.of(np.zeros((1, 40), np.float32), np.zeros(1, np.int32)))
    at = np.zeros(1, np.int32)
    for temperature in (0.0, 1.0):
        nothing = SamplingParams(temperature=temperature, rules=[Grammar(40, 0.0)])
        with pytest.raises(NoTokenAllowedError, match="every token is forbidden"):
            output.choose(at, [chooser_for(nothing, 40, 0, [], [])])
    with pytest.raises(RuleError, match=r"Grammar\.mask gave 1 words, but 40 tokens take 2"):
        output.choose(at, [chooser_for(SamplingParams(rules=[Grammar(30, 1.0)]), 40, 0, [], [])])


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([1, 3, 100, 255, 256, 257, 1000, 5000]), st.integers(0, 9999), st.integers(0, 30), st.booleans())
def test_log_probabilities_are_their_definitions_and_the_same_on_every_path(
    vocab: int, seed: int, top: int, forbidden: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, 4, (2, vocab)), seed % 3).astype(np.float32)
    if forbidden:
        logits[:, 1::2] = -np.inf
    at, tokens = np.array([7, 9], np.int32), rng.integers(0, vocab, 2).astype(np.int32)
    found = [
        NativeOutput(_native.Result.of(logits, at, isa)).logprobs(at, tokens, [top, 0]) for isa in _native.usable_isas()
    ]
    assert all(one == found[0] for one in found)
    for mine, row, token, n in zip(found[0], logits, tokens.tolist(), (top, 0), strict=True):
        defined = token_logprob(row, token, n)
        assert (mine.token, [one.token for one in mine.top]) == (token, [one.token for one in defined.top])
        for a, b in zip([mine, *mine.top], [defined, *defined.top], strict=True):
            assert a.logprob == pytest.approx(b.logprob, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_log_probabilities_of_logits_that_are_not_finite_are_nan(bad: float) -> None:
    logits = np.array([[1, 2, bad]], np.float32)
    at = np.zeros(1, np.int32)
    (found,) = NativeOutput(_native.Result.of(logits, at)).logprobs(at, np.ones(1, np.int32), [2])
    assert math.isnan(found.logprob)
    assert all(math.isnan(one.logprob) for one in found.top)


ABSENT = [([0], [3], [0]), ([0], [-1], [0]), ([0], [1], [-1]), ([1], [1], [0])]


@pytest.mark.parametrize(("at", "tokens", "top"), ABSENT)
def test_log_probabilities_of_what_is_not_there_are_refused(at: list[int], tokens: list[int], top: list[int]) -> None:
    output = NativeOutput(_native.Result.of(np.zeros((1, 3), np.float32), np.zeros(1, np.int32)))
    with pytest.raises(IndexError):
        output.logprobs(np.array(at, np.int32), np.array(tokens, np.int32), top)


def test_an_output_chooses_as_its_logits_say(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("Q4_1", threads=2, sizes={"vocab": 300})
    row = model.kv.alloc()
    output = model.forward(Batch.pack([row], [rng.integers(0, 300, 40).astype(np.int32)], [0], [True]))
    at = np.arange(40, dtype=np.int32)
    some = [
        SamplingParams(), SamplingParams(temperature=0.9), SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=1.2, top_k=7, top_p=0.7), SamplingParams(temperature=1.0, rules=[Foreign()]),
        SamplingParams(temperature=0.7, allowed_tokens=[3, 5, 250]), SamplingParams(rules=[Grammar(300, 0.3)]),
        SamplingParams(temperature=0.9, top_p=0.8, rules=[Grammar(300, 0.5), Foreign()]),
    ]  # fmt: skip
    choosers = [chooser_for(some[i % len(some)], 300, i, [1, 2, 3], [4, 4, 5]) for i in range(40)]
    logits = output.logits(at)
    assert output.choose(at, choosers).tolist() == [c.choose(row) for c, row in zip(choosers, logits, strict=True)]
    assert output.logprobs(at[:2], np.array([5, 6]), [0, 3])[1].top[0][0] == logits[1].argmax()
