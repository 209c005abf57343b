"""Fused choices are sampling.py's, and a batch's verdicts in one call are ``verify.walk`` on those choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Foreign, Grammar, Tiny

from outpace import _native
from outpace.common.arrays import I32
from outpace.errors import NoTokenAllowedError, RuleError
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser, token_logprob
from outpace.exact.verify import walk
from outpace.models.base import Batch, choose_on_host
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


RULES: list[dict[str, Any]] = [
    {},
    {},
    {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"frequency_penalty": -0.8, "logit_bias": {0: 1.5}},
    {"logit_bias": {0: -2.0}, "allowed_tokens": [0, 1]},
    {"rules": [Foreign()]},
    {"rules": [Grammar(3, 0.9)]},
]
SAMPLING: list[dict[str, Any]] = [
    {}, {"temperature": 0.3}, {"temperature": 1.0, "top_k": 2}, {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.2}, {"temperature": 0.6, "top_k": 4, "top_p": 0.93, "min_p": 0.05},
]  # fmt: skip


@dataclass
class Case:
    logits: Any  # [M, V]
    wanted: I32  # [M]
    starts: I32  # [B]
    drafts: Drafts
    choosers: list[Chooser | None]


@st.composite
def batches(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 1_000_000)))
    vocab = draw(st.sampled_from([2, 3, 5, 70]))
    widths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    b, w = len(widths), max(widths)
    trees = draw(st.booleans())
    tokens, parents = rng.integers(0, vocab, (b, w)), np.full((b, w), -1)
    logits, wanted, starts, at = [], [], [], 0
    choosers: list[Chooser | None] = []
    for i, k in enumerate(widths):
        parents[i, :k] = [int(rng.integers(-1, n)) if rng.random() < 0.4 else n - 1 for n in range(k)]
        at += int(rng.integers(0, 3))  # other rows' tokens, which are not wanted
        starts.append(at)
        wanted.extend(range(at, at + k + 1))
        at += k + 1
        own = rng.normal(0, 1, (k + 1, vocab)).astype(np.float32)
        above = parents[i, :k] if trees else np.arange(-1, k - 1)
        for n in range(k):  # likely choices, so that paths get long
            own[above[n] + 1, tokens[i, n]] += draw(st.sampled_from([0.0, 3.0, 9.0]))
        harm = draw(st.sampled_from([None] * 6 + [np.nan, np.inf, -np.inf]))
        if harm is not None:
            own[rng.integers(0, k + 1), rng.integers(vocab) if harm != -np.inf else slice(None)] = harm
        logits.append(own)
        if draw(st.integers(0, 5)) == 0:
            choosers.append(None)
            continue
        params = SamplingParams(**draw(st.sampled_from(SAMPLING)), **draw(st.sampled_from(RULES)))
        rules = rules_for(params, vocab)
        if any(isinstance(rule, Grammar) for rule in rules):
            rules = (Grammar(vocab, 0.9),)
        noise = Noise(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2)))
        chooser = Chooser.start(params, noise, rules, rng.integers(0, vocab, 4).astype(np.int32))
        choosers.append(chooser.after(rng.integers(0, vocab, draw(st.integers(0, 5))).tolist()))
    drafts = Drafts(tokens.astype(np.int32), np.array(widths, np.int32), parents.astype(np.int32) if trees else None)
    return Case(np.concatenate(logits), np.array(wanted, np.int32), np.array(starts, np.int32), drafts, choosers)


def reference(case: Case) -> tuple[Verdicts, set[int]]:
    """``walk`` over ``choose_on_host``, and the rows that cannot be decided."""
    failed: set[int] = set()

    def choose(rows: I32, nodes: I32) -> I32:
        found = []
        for i, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            chooser = case.choosers[i]
            if chooser is None:
                failed.add(i)
                found.append(-1)
                continue
            draft = case.drafts.row(i)
            after = chooser.after([draft.tokens[n] for n in draft.path(node)])
            at = np.searchsorted(case.wanted, case.starts[i] + 1 + node)
            try:
                found.append(int(choose_on_host(case.logits[at][None], [after])[0]))
            except (NoTokenAllowedError, FloatingPointError):
                failed.add(i)
                found.append(-1)
        return np.array(found, np.int32)

    return walk(choose, case.drafts), failed


def foreign(chooser: Chooser | None) -> bool:
    return chooser is not None and any(isinstance(rule, (Foreign, Grammar)) for rule in chooser.rules)


@settings(max_examples=200, deadline=None)
@given(case=batches())
def test_verdicts_are_the_references(case: Case, isa: str) -> None:
    output = NativeOutput(_native.Result.of(case.logits, case.wanted, isa))
    found = output.verify(case.drafts, case.starts, case.choosers)
    assert found is not None
    expected, failed = reference(case)
    assert [a.dtype for a in (found.tokens, found.accepted, found.path)] == [np.int32] * 3
    assert found.tokens.shape == expected.tokens.shape
    assert found.path.shape == expected.path.shape
    for i, chooser in enumerate(case.choosers):
        if i in failed or foreign(chooser):
            assert found.accepted[i] == -1
        elif found.accepted[i] == -1:
            assert chooser is not None
            assert chooser.params.top_p < 1  # too near its edge to be decided here
        else:
            assert found.accepted[i] == expected.accepted[i]
            assert found.tokens[i].tolist() == expected.tokens[i].tolist()
            assert found.path[i].tolist() == expected.path[i].tolist()
        if found.accepted[i] == -1:
            assert not found.tokens[i].any()
            assert not found.path[i].any()


def test_a_long_penalised_path_advances_its_counts() -> None:
    """Every token that is accepted lowers its own chance further on, as it does in Python."""
    vocab, k = 4, 40
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.35)
    chooser = Chooser.start(params, Noise(0), rules_for(params, vocab), np.array([1], np.int32))
    logits = np.random.default_rng(0).normal(1, 1, (k + 1, vocab)).astype(np.float32)
    true: list[int] = []
    for row in logits:
        true.append(chooser.after(true).choose(row))
    output = NativeOutput(_native.Result.of(logits, np.arange(k + 1, dtype=np.int32)))
    found = output.verify(Drafts.chains([true[:-1]]), np.zeros(1, np.int32), [chooser])
    assert found is not None
    assert found.accepted.tolist() == [k]
    assert found.tokens[0].tolist() == true
    assert len(set(true[k // 2 :])) > 1, "the penalties never mattered"


def test_what_does_not_fit_together_is_refused() -> None:
    output = NativeOutput(_native.Result.of(np.zeros((2, 5), np.float32), np.array([0, 1], np.int32)))
    chooser = Chooser(SamplingParams(), Noise(0), 0)
    one = Drafts.chains([[0, 0]])
    with pytest.raises(IndexError, match="packed index 2 was not wanted"):
        output.verify(one, np.zeros(1, np.int32), [chooser])
    with pytest.raises(ValueError, match="differ in length"):
        output.verify(one, np.zeros(1, np.int32), [chooser, chooser])
    with pytest.raises(ValueError, match="width is out of range"):
        output.verify(Drafts(one.tokens, np.array([3], np.int32)), np.zeros(1, np.int32), [chooser])
    biased = SamplingParams(logit_bias={7: 1.0})  # of a larger vocabulary: a matter of that row alone
    wrong = Chooser.start(biased, Noise(0), rules_for(biased, 10), np.zeros(1, np.int32))
    both = Drafts.chains([[], []])
    found = output.verify(both, np.array([0, 1], np.int32), [wrong, chooser])
    assert found is not None
    assert found.accepted.tolist() == [-1, 0]
