"""An answer that is resumed after any of its tokens goes on with the very same tokens, text and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outpace import Delta, Engine, ParameterError, SamplingParams
from outpace.drafters.lookup.ngram import NgramDrafter
from tests.driving import finished
from tests.grammar import lists_of_ones
from tests.toy import ToyModel, ToyTokenizer

PROMPT = [1, 2, 3, 1, 2]
EOS = 7
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.0, "seed": 5, **LOGPROBS},
    "seed, filters": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "seed": 8},
    "penalties": {
        "ignore_eos": True,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        **LOGPROBS,
    },
    "penalties, seed": {
        "ignore_eos": True,
        "temperature": 0.8,
        "presence_penalty": 1.1,
        "frequency_penalty": -0.4,
        "seed": 2,
    },
    "min_tokens": {"temperature": 1.5, "seed": 3, "min_tokens": 12, "stop": ["a", "b"], "stop_ids": [4]},
    "bad words": {"temperature": 1.0, "seed": 4, "bad_words": [[1, 2], [5, 6, 0], [3]], **LOGPROBS},
    "bias": {"logit_bias": {3: 2.0, 4: -float("inf")}, "allowed_tokens": [0, 1, 3, 4, 5]},
    "any eos": {"temperature": 2.0, "seed": 11},
    "eos ignored": {"temperature": 2.0, "seed": 11, "ignore_eos": True},
    "a rule of one's own": {
        "ignore_eos": True,
        "rules": [lambda tokens, logits: logits - 3.0 * (np.arange(8) == tokens[-1])],
    },
    "prompt's log-probabilities": {"prompt_logprobs": 1, **LOGPROBS},
}


def make(**options: Any) -> Engine:
    model = ToyModel(vocab=8, eos=(EOS,), max_length=96)
    return Engine(model, ToyTokenizer(), drafter=NgramDrafter(), **{"size": 4, **options})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make()


def streamed(engine: Engine, params: SamplingParams, **options: Any) -> list[Delta]:
    return list(engine.stream(PROMPT, params, errors="return", **options))


def check_every_resume(engine: Engine, params: SamplingParams) -> int:
    """How many tokens the answer has, at every one of which it was resumed, drafted, plainly, and verified."""
    by_token = streamed(engine, params, drafter=False)
    whole = by_token[-1].result
    assert whole is not None
    tokens, n = list(whole.token_ids), len(whole.token_ids)
    texts = [delta.text for delta in by_token]
    assert [len(delta.token_ids) for delta in by_token] == [1] * n
    for k in range(n + 1):
        for options in ({}, {"drafter": False}, {"verify_resume": True}):
            deltas = streamed(engine, params, resume=tokens[:k], **options)
            result = deltas[-1].result
            assert result is not None
            assert [t for delta in deltas for t in delta.token_ids] == tokens[k:]
            assert "".join(delta.text for delta in deltas) == "".join(texts[k:])
            assert [its for delta in deltas for its in delta.logprobs] == list(whole.logprobs[k:])
            assert [s for delta in deltas for s in delta.sources] == list(result.sources[k:])
            assert all(delta.token_ids for delta in deltas[:-1])
            assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
            assert (result.finish_reason, result.stopped_by) == (whole.finish_reason, whole.stopped_by)
            assert (result.prompt_tokens, result.seed) == (whole.prompt_tokens, params.seed or result.seed)
            assert result.logprobs == whole.logprobs[k:]
            assert k == 0 or not any(delta.prompt_logprobs for delta in deltas)
    engine.check()
    return n


@pytest.mark.parametrize("kind", ASKED)
def test_it_goes_on_the_same_after_every_token(engine: Engine, kind: str) -> None:
    assert check_every_resume(engine, SamplingParams(**{"max_tokens": 24, **ASKED[kind]})) > 3


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_cross_the_border(engine: Engine, include: bool) -> None:
    text = engine.generate(PROMPT, max_tokens=24, drafter=False, temperature=0.9, seed=1, ignore_eos=True).text
    for stop in (text[9:12], text[5:10], [text[3:6] + "!", text[7:11]]):
        params = SamplingParams(
            max_tokens=24, temperature=0.9, seed=1, ignore_eos=True, stop=stop, include_stop=include
        )
        assert check_every_resume(engine, params) < 24
    unfinished = SamplingParams(max_tokens=12, temperature=0.9, seed=1, ignore_eos=True, stop=text[10:12] + "!")
    assert check_every_resume(engine, unfinished) == 12  # its last text was held back until the end


def test_a_grammar_stands_where_it_was(engine: Engine) -> None:
    lengths = {
        check_every_resume(engine, SamplingParams(max_tokens=20, temperature=2.0, seed=seed, rules=[lists_of_ones()]))
        for seed in range(6)
    }
    assert len(lengths) > 1


def test_samples_are_resumed_each_where_it_stood(engine: Engine) -> None:
    params = SamplingParams(n=3, max_tokens=10, temperature=2.0, seed=6, **LOGPROBS)
    whole = engine.generate_many([PROMPT], params, drafter=False)
    lengths = [len(result.token_ids) for result in whole]
    for k in range(11):
        before = [list(result.token_ids[: (k + 4 * i) % 11]) for i, result in enumerate(whole)]
        request = engine.add(PROMPT, params, resume=before)
        again = finished(engine)
        for i, result in enumerate(whole):
            own = again[request, i]
            assert (own.token_ids, own.text, own.finish_reason) == (result.token_ids, result.text, result.finish_reason)
            assert own.logprobs == result.logprobs[len(before[i]) :]
    assert min(lengths) < 10, "none ended before the others"


def test_it_may_be_preempted_and_resumed_again() -> None:
    """Memory for two rows at most: what was resumed waits, goes on, and is resumed once more."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=9, ignore_eos=True, presence_penalty=0.5)
    whole = make().generate(PROMPT, params).token_ids
    tight = make(kv_memory=24 * ToyModel().kv.bytes_for(4) // 4 * 3, max_rows=4)
    for k in (0, 7, 19, 33):
        others = [tight.add(PROMPT, params, resume=list(whole[: k + i])) for i in range(4)]
        results = finished(tight)
        assert all(results[request, 0].token_ids == whole for request in others)
    assert tight.snapshot().preemptions > 0


@pytest.mark.parametrize(
    ("resume", "more", "says"),
    [
        ([1, 8], {}, "token id 8, but this model's ids go from 0 to 7"),
        ([1, True], {}, "token id True"),
        ([1.5], {}, "token id 1.5"),
        ([[1], [2]], {}, "1 samples"),
        ([1], {"n": 2}, "2 samples"),
        ([1], {"temperature": 1.0}, "needs the seed"),
        ([1], {"acceptance": "rejection"}, "cannot be resumed"),
        ([1, EOS, 2], {}, "token 7 at index 1 ends the answer"),
        ([1, 2, 3, 4], {"max_tokens": 3}, "token 3 at index 2 ends the answer"),
        ([1, 2, 3], {"stop": "bc"}, "token 2 at index 1 ends the answer"),
        ([1, 2], {"bad_words": [[1, 2]]}, "token 2 at index 1, which a rule"),
        ([EOS], {"min_tokens": 2}, "token 7 at index 0, which a rule"),
        ([2], {"rules": [lists_of_ones()]}, "token 2 at index 0, which a rule"),
    ],
)
def test_what_cannot_be_this_requests_is_refused(engine: Engine, resume: Any, more: Any, says: str) -> None:
    with pytest.raises(ParameterError, match=says) as found:
        engine.add(PROMPT, resume=resume, **more)
    assert "resume" in str(found.value)
    assert engine.idle


def test_verifying_finds_the_last_tokens_changed(engine: Engine) -> None:
    for params in (SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, seed=3)):
        params = params.with_(ignore_eos=True)
        tokens = list(engine.generate(PROMPT, params).token_ids)
        for at in range(8, 16):
            other = [*tokens[:at], (tokens[at] + 1) % EOS, *tokens[at + 1 : 16]]
            with pytest.raises(ParameterError, match=f"at index {at} .sample 0., where this request chooses"):
                engine.generate(PROMPT, params, resume=other, verify_resume=True)
            unverified = engine.generate(PROMPT, params, resume=other)
            assert list(unverified.token_ids[:16]) == other
    assert engine.idle
    engine.check()


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8, "seed": 4, "presence_penalty": 0.5, "logprobs": True}])
def test_a_drafter_that_reads_the_model_goes_on(asked: dict[str, Any]) -> None:
    """With the demo model's own drafters, a learned one among them."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **asked)
    with Engine.load("demo", max_length=512) as engine:
        whole = engine.generate("Write about a river.", params, drafter=False)
        for k in (0, 1, 13, 32, 39, 40):
            for verify in (False, True):
                again = engine.generate(
                    "Write about a river.", params, resume=whole.token_ids[:k], verify_resume=verify
                )
                assert (again.token_ids, again.text) == (whole.token_ids, whole.text)
                assert again.logprobs == whole.logprobs[k:]
        engine.check()
