"""Parameters: what makes no sense is refused by name; what does is kept as plain Python."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from outpace.errors import ParameterError
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from outpace.exact.noise import Noise, Stream
from outpace.params import SamplingParams

NAN, INF = math.nan, math.inf
TOO_LARGE = 2**31

REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, NAN, INF, 0.0005, "1", None, True, [1.0], 1j],
    "top_k": [-1, 1.5, 2.0, "5", None, True, NAN, TOO_LARGE],
    "top_p": [0, 0.0, -0.5, 1.01, NAN, "0.9", None, True],
    "min_p": [-0.01, 1.01, NAN, INF, "0", None, False],
    "repetition_penalty": [0, 0.0, -1.0, 101, NAN, INF, "1", None],
    "presence_penalty": [-101, 101, NAN, -INF, "0", None],
    "frequency_penalty": [-101, 101, NAN, INF, "0", None],
    "logit_bias": [
        {1: NAN},
        {1: INF},
        {1: 1e39},
        {1: "2"},
        {1: None},
        {1: True},
        {-1: 0.0},
        {"a": 1.0},
        {1.5: 0.0},
        [1],
    ],
    "allowed_tokens": [[], [-1], [1.5], ["a"], [True], 5, "ab", [TOO_LARGE], np.array([1.0])],
    "rules": [5, "ab"],
    "seed": [-1, 2**64, 1.0, "1", True],
    "max_tokens": [0, -1, 2.5, "9", True, TOO_LARGE],
    "stop": [5, [1], ["a", ""], [None], None],
    "stop_ids": [5, "ab", [-1], [1.5], [True], [TOO_LARGE], None],
    "ignore_eos": [1, "yes", None],
    "n": [0, -1, 1025, 1.0, "2", None, True],
    "logprobs": [5, 1, "yes", None],
    "top_logprobs": [-1, 101, 2.5, "3", None, True],
}
ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 0.001, 1, np.float32(0.5), np.int64(1), 100],
    "top_k": [0, 1, np.int32(40), 2**31 - 1],
    "top_p": [1, 1e-9, np.float64(0.5)],
    "min_p": [0, 1, np.float32(0.1)],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-100, 2.0],
    "frequency_penalty": [-100, np.float16(2)],
    "logit_bias": [{}, {0: 1}, {np.int32(3): np.float32(1.5)}, {7: -INF}],
    "allowed_tokens": [None, [0], (1, 2), np.array([1, 2]), {3}, range(4)],
    "seed": [None, 0, 2**64 - 1, np.int32(7), np.uint64(2**64 - 1), np.uint8(1)],
    "max_tokens": [None, 1, np.int64(9)],
    "stop": ["", "a", ["a", "b"], ("a",), []],
    "stop_ids": [(), [0], np.array([4], np.int32), {5}],
    "ignore_eos": [True, np.bool_(True)],
    "n": [1, 1024, np.int8(3)],
    "logprobs": [True, np.bool_(False)],
    "top_logprobs": [0, 100, np.int16(5)],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_every_parameter_has_its_table() -> None:
    assert set(REFUSED) == set(SamplingParams.__dataclass_fields__)
    assert set(ACCEPTED) == set(SamplingParams.__dataclass_fields__) - {"rules"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_sense_is_kept_as_plain_python(name: str, value: Any) -> None:
    kept = getattr(SamplingParams(**{name: value}), name)
    json.dumps(kept)
    if isinstance(value, (int, float, np.number)):
        assert kept == value
        assert not isinstance(kept, np.generic)


@pytest.mark.parametrize("seed", [np.int32(7), np.uint8(7), np.int64(7), np.uint64(7)])
def test_a_seed_is_its_value_whatever_its_type(seed: int) -> None:
    ids = np.arange(9, dtype=np.int32)
    given = SamplingParams(seed=seed).seed
    assert given is not None
    assert (Noise(given).bits(1, ids, Stream.CHOICE) == Noise(7).bits(1, ids, Stream.CHOICE)).all()


def test_stop_is_a_tuple_of_texts() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop="").stop_strings == ()
    assert SamplingParams(stop=["a", "bc"]).stop_strings == ("a", "bc")


def test_a_changed_copy_is_validated_anew() -> None:
    params = SamplingParams(stop="x", logit_bias={1: 2.0})
    assert params.with_(temperature=0.5) == SamplingParams(stop="x", logit_bias={1: 2.0}, temperature=0.5)
    with pytest.raises(ParameterError, match="top_p=2"):
        params.with_(top_p=2)


def test_top_logprobs_imply_logprobs() -> None:
    assert [
        SamplingParams(logprobs=a, top_logprobs=k).wants_logprobs for a, k in ((False, 0), (True, 0), (False, 1))
    ] == [
        False,
        True,
        True,
    ]


def test_drafts_are_views_of_rows_and_name_their_sources() -> None:
    drafts = Drafts.chains([[1, 2, 3], [], [4]], "ngram")
    assert [drafts.row(i).tokens.tolist() for i in range(3)] == [[1, 2, 3], [], [4]]
    assert drafts.source_of(0, 2) == "ngram"
    assert drafts.row(0).children(-1) == [0]
    assert drafts.row(0).children(2) == []
    assert Drafts.empty(2).row(1).children(-1) == []
    tree = Draft(np.array([5, 5, 6, 7], np.int32), np.array([-1, -1, 0, 1], np.int32))
    assert (tree.children(-1), tree.children(1), tree.parent(3)) == ([0, 1], [3], 1)


def test_verdicts_of_different_depths_travel_together() -> None:
    rows = [Verdict(np.array(t, np.int32), np.array(p, np.int32)) for t, p in (([1, 2, 3], [0, 4]), ([9], []))]
    together = Verdicts.of(rows)
    assert [(v.tokens.tolist(), v.path.tolist(), v.accepted) for v in together] == [
        ([1, 2, 3], [0, 4], 2),
        ([9], [], 0),
    ]
