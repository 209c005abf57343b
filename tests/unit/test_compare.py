"""First differences, and the gap that tells a rounding from a bug."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from outpace.engine.engine import Engine
from outpace.errors import ParameterError
from outpace.exact.noise import Noise
from outpace.measure.compare import (
    NEAR_TIE,
    Difference,
    compare,
    compare_tokens,
    first_difference,
    promises_tokens,
    require_tokens,
    score_gap,
    scores_after,
)
from outpace.params import SamplingParams
from tests.toy import ToyModel

PROMPT = np.array([1, 2, 3, 4], np.int32)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [7], 0), ([5, 1], [6, 1], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected
    assert first_difference(b, a) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3, max_tokens=9),
        SamplingParams(seed=3, max_tokens=9, temperature=0.8, top_k=6, repetition_penalty=1.3),
    ],
)
def test_replayed_scores_choose_what_decoding_chose(params: SamplingParams) -> None:
    """Rules, filters, noise and the output index are those of the run itself."""
    engine = Engine(ToyModel())
    result = engine.generate(PROMPT.tolist(), params)
    for i, token in enumerate(result.token_ids):
        scores = scores_after(engine, PROMPT, result.token_ids[:i], params, Noise(3))
        assert int(scores.argmax()) == token
    assert engine.model.kv.rows == []  # the replay leaves nothing behind


def test_a_gap_is_measured_from_the_best_score() -> None:
    engine = Engine(ToyModel())
    params, noise = SamplingParams(seed=0), Noise(0)
    scores = scores_after(engine, PROMPT, [], params, noise)
    order = np.argsort(-scores)
    best, second, third = (int(i) for i in order[:3])
    assert score_gap(engine, PROMPT, [], best, second, params, noise) == scores[best] - scores[second]
    # Two that are equal to each other but far from the best are no near-tie.
    assert score_gap(engine, PROMPT, [], third, third, params, noise) == scores[best] - scores[third] > NEAR_TIE


def test_identical_near_tie_and_different() -> None:
    class Close(ToyModel):
        """Tokens 4 and 5 are nearly equal, and far above the rest."""

        def logits_after(self, prefix: list[int], layers: int | None = None) -> np.ndarray:
            logits = super().logits_after(prefix).copy()
            logits[4], logits[5] = 50.0, 50.0 - 1e-4
            return logits

    engine = Engine(Close())
    params, noise = SamplingParams(seed=0), Noise(0)
    assert compare_tokens(engine, PROMPT, params, noise, [4, 4], [4, 4]) is None
    tie = compare_tokens(engine, PROMPT, params, noise, [4, 4, 4], [4, 5, 4])
    assert tie is not None
    assert tie.near_tie
    assert (tie.index, tie.tokens) == (1, (4, 5))
    assert str(tie).startswith("near-tie at token 1 (4 / 5, score gap ")
    bug = compare_tokens(engine, PROMPT, params, noise, [4, 4], [4, 6])
    assert bug is not None
    assert not bug.near_tie
    assert "DIFFERENT at token 1" in str(bug)


def test_an_output_that_ended_early_is_no_near_tie() -> None:
    engine = Engine(ToyModel())
    short, long = (engine.generate(PROMPT.tolist(), SamplingParams(seed=0, max_tokens=n)) for n in (3, 5))
    difference = compare(engine, PROMPT, SamplingParams(seed=0), short, long)
    assert difference is not None
    assert (difference.index, difference.gap, difference.near_tie) == (3, math.inf, False)
    assert difference.tokens == (None, long.token_ids[3])
    assert "ended" in str(difference)


def test_a_difference_is_valid_json() -> None:
    written = json.dumps(Difference(2, math.inf, (None, 3)).to_dict(), allow_nan=False)
    assert json.loads(written) == {"index": 2, "gap": None, "tokens": [None, 3], "near_tie": False}


def test_a_filtered_token_and_nan_are_no_near_tie() -> None:
    engine = Engine(ToyModel())
    params = SamplingParams(seed=0, temperature=1.0, top_k=1)
    scores = scores_after(engine, PROMPT, [], params, Noise(0))
    a, b = int(np.argmin(scores)), int(np.argmax(scores))
    assert score_gap(engine, PROMPT, [], a, b, params, Noise(0)) == math.inf
    assert not Difference(0, math.nan, (a, b)).near_tie


def test_only_what_was_promised_is_compared() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0)
    assert promises_tokens("coupled", sampled)
    assert all(promises_tokens(rule, greedy) for rule in ("coupled", "rejection", "typical"))
    with pytest.raises(ParameterError, match="promises the same distribution, not the same tokens"):
        require_tokens("rejection", sampled)
    with pytest.raises(ParameterError, match="lossy"):
        require_tokens("typical", sampled)
