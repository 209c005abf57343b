"""A whole batch's verdicts in one call are ``verify.walk`` on the choices that the reference makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Foreign, Grammar

from outpace import _native
from outpace.common.arrays import I32
from outpace.errors import NoTokenAllowedError
from outpace.exact.drafts import Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.exact.verify import walk
from outpace.models.base import choose_on_host
from outpace.models.native.output import NativeOutput
from outpace.params import SamplingParams

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
def cases(draw: st.DrawFn) -> Case:
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
@given(case=cases())
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
