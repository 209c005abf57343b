"""Grammars under every kind of draft: the tokens of plain decoding under masks alone, and texts that fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from outpace import Engine, Grammars, SamplingParams
from outpace.common.arrays import I32
from outpace.drafters.base import Drafter, RowView
from outpace.drafters.lookup.suffix import SuffixDrafter
from outpace.errors import NoTokenAllowedError, RuleError
from outpace.exact.drafts import Drafts
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from tests.driving import finished
from tests.random_schemas import schema
from tests.small_tokenizers import byte_level
from tests.toy import BYTES, ToyModel

jsonschema = pytest.importorskip("jsonschema")
VOCAB, MOST = 450, 50
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {40: 3.0}, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "min_tokens": 3, "bad_words": ["e"]},
    {"temperature": 0.8, "logprobs": True, "top_logprobs": 2},
]


class Guesser(Drafter):
    """Knows the target, and is right two times in three: trees whose other nodes are anything, allowed or not."""

    name = "guesser"

    def __init__(self, target: ToyModel, seed: int) -> None:
        self._target, self._rng = target, np.random.default_rng(seed)

    def propose(self, rows: Sequence[RowView], sizes: I32) -> Drafts:
        its = [self._draft(view, int(size)) for view, size in zip(rows, sizes, strict=True)]
        tokens, parents = np.zeros((len(rows), 8), np.int32), np.full((len(rows), 8), -1, np.int32)
        for i, (said, above) in enumerate(its):
            tokens[i, : len(said)], parents[i, : len(said)] = said, above
        return Drafts(tokens, np.array([len(said) for said, _ in its], np.int32), parents)

    def _draft(self, view: RowView, size: int) -> tuple[list[int], list[int]]:
        tokens, parents = list[int](), list[int]()
        nodes: list[tuple[list[int], Chooser | None]] = [(view.tokens.tolist(), view.chooser)]
        for i in range(int(self._rng.integers(size + 1))):
            parent = i - 1 if self._rng.random() < 0.7 else int(self._rng.integers(-1, i))
            prefix, chooser = nodes[parent + 1]
            token, after = int(self._rng.integers(VOCAB)), None
            if chooser is not None and self._rng.random() < 0.67:
                try:
                    token = chooser.choose(self._target.logits_after(prefix))
                    after = chooser.advance(token)
                except (NoTokenAllowedError, RuleError):
                    after = None
            tokens.append(token)
            parents.append(parent)
            nodes.append(([*prefix, token], after))
        return tokens, parents


class Masked:
    """A grammar of which nothing but masks is seen."""

    def __init__(self, grammar: Any) -> None:
        self.start, self.advance, self.mask, self.apply = grammar.start, grammar.advance, grammar.mask, grammar.apply


def plainly(model: ToyModel, prompt: list[int], params: SamplingParams, sample: int) -> tuple[int, ...]:
    """Tokens one at a time, from masks."""
    masked = params.with_(rules=[Masked(rule) for rule in params.rules])
    rules = rules_for(masked, VOCAB, lambda text: byte_level().encode(text), [0])
    chooser = Chooser.start(masked, Noise(params.seed or 0, sample), rules, np.array(prompt, np.int32))
    said: list[int] = []
    while len(said) < MOST and (not said or said[-1] != 0):
        try:
            said.append(chooser.choose(model.logits_after([*prompt, *said])))
        except NoTokenAllowedError:
            break
        if said[-1] != 0:
            chooser = chooser.advance(said[-1])
    return tuple(said)


def target(limit: int | None = None) -> ToyModel:
    return ToyModel(VOCAB, seed=4, max_length=200, eos=(0,), limit=limit)


def drafter_of(kind: str, model: ToyModel) -> Drafter:
    return Guesser(model, 1) if kind == "guesser" else SuffixDrafter(vocab=VOCAB)


@pytest.mark.parametrize(("kind", "positions"), [("guesser", None), ("suffix", 200)])
def test_schemas_give_plain_decodings_tokens(kind: str, positions: int | None) -> None:
    """Eighteen schemas with all parameters in a ragged batch, two samples of some, preempted where memory ends."""
    model = target(None if positions is None else positions * BYTES)
    grammars = Grammars(byte_level(), VOCAB, [0])
    schemas = [schema(Random(1000 + i), 2) for i in range(18)]
    asked: dict[int, tuple[list[int], SamplingParams, Any]] = {}
    drafter = drafter_of(kind, model)
    with Engine(model, byte_level(), drafter=drafter, size=7, max_rows=5, prefill_chunk=9, prefix_rows=1) as engine:
        for i, its in enumerate(schemas):
            after = "</think>" if i % 7 == 3 else None
            params = SamplingParams(
                rules=[grammars.json_schema(its, after=after)], seed=i, n=1 + (i % 9 == 0), max_tokens=MOST,
                **OPTIONS[i % len(OPTIONS)],
            )  # fmt: skip
            prompt = byte_level().encode(f"say {i}, please " * (1 + i % 3)).tolist()
            asked[engine.add(prompt, params)] = prompt, params, None if after else its
        results = finished(engine)
        assert engine.stats.accepted > 50
        preempted = engine.stats.preemptions
        written = engine.stats.accepted_by
    assert (preempted > 0) == (positions is not None)
    assert written["grammar"] > 20
    whole = 0
    for (request, sample), result in results.items():
        prompt, params, its = asked[request]
        assert result.token_ids == plainly(model, prompt, params, sample), (request, result.error)
        if result.finish_reason == "stop" and its is not None:
            jsonschema.Draft202012Validator(its).validate(json.loads(result.text))
            whole += 1
    assert whole >= 5


@pytest.mark.parametrize("text", ["</think>", "th", "<|mark|>"])
def test_reasoning_that_ends_inside_a_draft_is_followed_by_the_grammar(text: str) -> None:
    """vllm-project/vllm 36138. The bias makes the free text end soon, at every place of a draft."""
    model, grammars = target(), Grammars(byte_level(), VOCAB, [0])
    ends = byte_level().encode(text, parse_special=True).tolist()
    switched = 0
    with Engine(model, byte_level(), drafter=Guesser(model, 2), size=7, prefix_rows=0) as engine:
        for seed in range(7):
            params = SamplingParams(
                rules=[grammars.regex("(yes|no)!{3}", after=text)], seed=seed, temperature=1.0, max_tokens=MOST,
                logit_bias=dict.fromkeys(ends, 7.0), skip_special_tokens=False,
            )  # fmt: skip
            result = engine.generate([5, 6 + seed], params)
            assert result.token_ids == plainly(model, [5, 6 + seed], params, 0)
            if result.finish_reason == "stop":
                assert result.text.partition(text)[2].removesuffix("<|end|>") in ("yes!!!", "no!!!")
                switched += 1
    assert switched >= 3


def test_under_rejection_a_grammar_is_obeyed() -> None:
    model, grammars = target(), Grammars(byte_level(), VOCAB, [0])
    with Engine(model, byte_level(), drafter=Guesser(model, 3), size=5, acceptance="rejection") as engine:
        for seed in range(6):
            params = SamplingParams(rules=[grammars.regex("(ab|cd){3}[0-9]")], seed=seed, temperature=1.0)
            result = engine.generate([5, 6], params)
            assert result.finish_reason == "stop", result.error
            assert grammars.regex("(ab|cd){3}[0-9]") is params.rules[0]
            assert len(result.text) == 7
            assert set(result.text[:6]) <= set("abcd")


class Wild:
    """Says that a token which is none must follow."""

    def __init__(self, token: int) -> None:
        self._token = token

    def start(self, prompt: I32) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return state

    def apply(self, state: int, logits: Any) -> None:
        """Nothing."""

    def forced(self, state: int) -> list[int]:
        return [self._token]


@pytest.mark.parametrize("token", [-1, 6, 10**12])
def test_a_token_that_is_none_is_never_drafted(token: int) -> None:
    engine = Engine(ToyModel(6, max_length=64), size=4)
    plain = engine.generate([1], max_tokens=8, ignore_eos=True, drafter=False)
    beside = engine.add([2], max_tokens=8, ignore_eos=True)
    found = engine.generate([1], max_tokens=8, ignore_eos=True, rules=[Wild(token)])
    assert found.token_ids == plain.token_ids
    assert len(finished(engine)[beside, 0].token_ids) == 8


class Countdown:
    """Only token 3 may follow, so often; then nothing may."""

    def __init__(self, left: int) -> None:
        self._left = left

    def start(self, prompt: I32) -> int:
        return self._left

    def advance(self, state: int, token: int) -> int:
        return state - 1

    def apply(self, state: int, logits: Any) -> None:
        logits[np.arange(len(logits)) != (3 if state else -1)] = -np.inf

    def forced(self, state: int) -> list[int]:
        return [3] * state


def test_tokens_that_must_follow_are_not_drafted_beyond_the_context() -> None:
    model = ToyModel(6, max_length=20)
    steps = list[Any]()
    with Engine(model, drafter=SuffixDrafter(vocab=6), size=8) as engine:
        engine.on_step = steps.append
        result = engine.generate([1, 2], rules=[Countdown(99)], ignore_eos=True)
    assert len(result.token_ids) == 18
    rows = [row for step in steps for row in step.rows]
    assert max(len(row.kept) for row in rows) == 8
    assert all(row.start + len(row.kept) < 20 for row in rows), "a forward of positions that the model has not"


@pytest.mark.parametrize("size", [0, 1, 8])
def test_a_dead_end_leaves_what_was_accepted_with_its_figures(size: int) -> None:
    with Engine(ToyModel(6, max_length=64), drafter=SuffixDrafter(vocab=6), size=size) as engine:
        params = SamplingParams(rules=[Countdown(5)], ignore_eos=True, logprobs=True)
        (result,) = engine.generate_many([[1, 2]], params, errors="return")
    assert (result.finish_reason, result.token_ids) == ("error", (3,) * 5)
    assert [one.token for one in result.logprobs] == [3] * 5
