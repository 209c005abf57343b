"""The fused choice is sampling.py's choice on the same logits, for every parameter and rule it knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Tiny

from outpace import _native
from outpace.errors import NoTokenAllowedError
from outpace.exact.drafts import Draft
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.exact.verify import walk_row
from outpace.models.base import Batch
from outpace.models.native.model import _UNDECIDED, describe_rules, describe_sampling
from outpace.params import SamplingParams


def fused(logits: Any, chooser: Chooser, isa: str = "") -> int:
    token: int = _native.choose(logits, describe_rules(chooser), *describe_sampling(chooser), isa)
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
    ids = st.integers(0, vocab - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7, 20.0, 0.001])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 40, vocab, vocab + 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.1, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-5.0, 3.0]), max_size=4)),
        allowed_tokens=draw(st.none() | st.lists(ids, min_size=1, max_size=20)),
    )
    chooser = chooser_for(
        params,
        vocab,
        draw(st.integers(0, 2**64 - 1)),
        draw(st.lists(ids, max_size=10)),
        draw(st.lists(ids, max_size=10)),
    )
    return logits, chooser


@settings(max_examples=400, deadline=None)
@given(case=cases())
def test_fused_choices_are_the_references(case: tuple[Any, Chooser], isa: str) -> None:
    logits, chooser = case
    try:
        expected = chooser.choose(logits)
    except NoTokenAllowedError:
        expected = -1
    token = fused(logits, chooser, isa)
    if token != _UNDECIDED:  # the reference then decides, as NativeOutput.choose has it
        assert token == expected


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02}, {"top_k": 200, "top_p": 0.8}])
def test_undecided_is_rare(params: dict[str, Any], isa: str, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 3, 49152).astype(np.float32)
    chooser = Chooser(SamplingParams(temperature=0.8, **params), Noise(5), 0)
    for index in range(30):
        chooser = chooser.advance(0)
        assert fused(logits, chooser, isa) == chooser.choose(logits), index


def test_nan_and_forbidden(isa: str) -> None:
    sampled = Chooser(SamplingParams(temperature=1.0), Noise(0), 0)
    assert fused(np.full(20, -np.inf, np.float32), sampled, isa) == -1
    assert fused(np.array([0, np.nan, 1], np.float32), sampled, isa) == -2
    with pytest.raises(IndexError, match="not in the vocabulary"):
        fused(np.zeros(3, np.float32), chooser_for(SamplingParams(logit_bias={7: 1.0}), 10, 0, [], []), isa)


class Foreign:
    """A rule that the runtime has never heard of: it forbids even tokens."""

    def start(self, prompt: Any) -> None: ...

    def advance(self, state: None, token: int) -> None: ...

    def apply(self, state: None, logits: Any) -> None:
        logits[::2] = -np.inf


def test_an_output_chooses_as_its_logits_say(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("Q4_1", threads=2, sizes={"vocab": 300})
    row = model.kv.alloc(64)
    output = model.forward(Batch.pack([row], [rng.integers(0, 300, 40).astype(np.int32)], [0], [True]))
    at = np.arange(40, dtype=np.int32)
    some = [
        SamplingParams(), SamplingParams(temperature=0.9), SamplingParams(repetition_penalty=1.5),
        SamplingParams(temperature=1.2, top_k=7, top_p=0.7), SamplingParams(temperature=1.0, rules=[Foreign()]),
        SamplingParams(temperature=0.7, allowed_tokens=[3, 5, 250]),
    ]  # fmt: skip
    choosers = [chooser_for(some[i % len(some)], 300, i, [1, 2, 3], [4, 4, 5]) for i in range(40)]
    logits = output.logits(at)
    assert output.choose(at, choosers).tolist() == [c.choose(row) for c, row in zip(choosers, logits, strict=True)]
    assert output.logprobs(at[:2], np.array([5, 6]), [0, 3])[1].top[0][0] == logits[1].argmax()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("chain", [False, True])
def test_a_walk_is_walk_row_on_the_choices(
    params: dict[str, Any], chain: bool, tiny: Tiny, rng: np.random.Generator
) -> None:
    model = tiny.load("Q4_1", threads=1, sizes={"vocab": 6})
    row, deepest = model.kv.alloc(64), 0
    for seed in range(30):
        chooser = chooser_for(SamplingParams(**params), 6, seed, [1], [2, 2])
        true = [seed % 6]  # what is chosen, token by token
        for at in range(int(rng.integers(0, 8))):
            output = model.forward(Batch.single(row, np.array(true[-1:], np.int32), at))
            true += output.choose(np.zeros(1, np.int32), [chooser.after(true[1:])]).tolist()
        model.kv.truncate(row, 0)
        k = int(rng.integers(0, 16))
        tokens = np.array(true[1:] + rng.integers(0, 6, k).tolist(), np.int32)
        above = list(range(-1, len(true) - 2))
        parents = None if chain else np.array(above + [rng.integers(-1, len(true) - 1 + i) for i in range(k)], np.int32)
        draft = Draft(tokens, parents)
        tree = None if parents is None else [-1, *(parents + 1).tolist()]
        output = model.forward(Batch.single(row, np.append(np.int32(true[0]), tokens), 0, tree))

        def choose(node: int, output: Any = output, chooser: Chooser = chooser, draft: Draft = draft) -> int:
            at = chooser.after(draft.tokens[draft.path(node)].tolist())
            return int(output.choose(np.array([node + 1], np.int32), [at])[0])

        expected, found = walk_row(choose, draft), output.walk(0, draft, chooser)
        assert found is not None
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.path.tolist() == expected.path.tolist()
        deepest = max(deepest, found.accepted)
        model.kv.truncate(row, 0)
    assert deepest > 5
    penalised = chooser_for(SamplingParams(repetition_penalty=1.5), 6, 0, [1], [2])
    assert output.walk(0, Draft(np.zeros(0, np.int32)), penalised) is None  # its state changes with every token
