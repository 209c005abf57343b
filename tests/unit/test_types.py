"""Parameters: what makes no sense is refused by name; what does is kept as plain Python."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.common.habits import ELSEWHERE
from outpace.errors import Argument, ModelError, ParameterError
from outpace.exact.drafts import Draft, Drafts, Verdict, Verdicts
from outpace.params import FILTERS, PARAMETERS, SamplingParams

NAN, INF = math.nan, math.inf
TOO_LARGE = 2**31

REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, NAN, INF, 0.0005, "1", None, True, [1.0], 1j],
    "top_n_sigma": [-0.1, 100.1, NAN, INF, "1", True],
    "top_k": [-2, 1.5, 2.0, "5", True, NAN, TOO_LARGE],
    "top_p": [0, 0.0, -0.5, 1.01, NAN, "0.9", True],
    "min_p": [-0.01, 1.01, NAN, INF, "0", False],
    "repetition_penalty": [0, 0.0, -1.0, 101, NAN, INF, "1"],
    "presence_penalty": [-101, 101, NAN, -INF, "0"],
    "frequency_penalty": [-101, 101, NAN, INF, "0"],
    "logit_bias": [
        {1: NAN}, {1: INF}, {1: 1e39}, {1: "2"}, {1: None}, {1: True}, {-1: 0.0}, {"a": 1.0}, {1.5: 0.0}, [1],
    ],
    "allowed_tokens": [[], [-1], [1.5], ["a"], [True], 5, "ab", [TOO_LARGE], np.array([1.0])],
    "no_repeat_ngram_size": [-1, 2.5, "3", True, TOO_LARGE],
    "bad_words": [5, b"ab", [""], [" "], [[]], [5], [[-1]], [["a"]], [[1.5]], [None], {"a"}, ["\udce9"]],
    "rules": [5, "ab"],
    "seed": [-1, 2**64, 1.0, "1", True],
    "max_tokens": [0, -1, 2.5, "9", True, TOO_LARGE],
    "min_tokens": [-1, 257, 2.5, "9", True],
    "stop": [5, [1], ["a", ""], [None], "\udce9", ["a", "b\ud800"]],
    "stop_ids": [5, "ab", [-1], [1.5], [True], [TOO_LARGE]],
    "include_stop": [1, "yes", None],
    "ignore_eos": [1, "yes", None],
    "skip_special_tokens": [0, "no", None],
    "n": [0, -1, 1025, 1.0, "2", None, True],
    "logprobs": [5, 1, "yes", None],
    "top_logprobs": [-1, 101, 2.5, "3", None, True],
    "prompt_logprobs": [-1, 101, 2.5, "3", True],
}  # fmt: skip
ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 0.001, 1, np.float32(0.5), np.int64(1), 100],
    "top_n_sigma": [0, 1, 1.5, np.float32(2)],
    "top_k": [0, 1, np.int32(40), 2**31 - 1],
    "bad_words": ["ab", ["a b", [1, 2]], [np.array([3])], [(1,)], []],
    "top_p": [1, 1e-9, np.float64(0.5)],
    "min_p": [0, 1, np.float32(0.1)],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-100, 2.0],
    "frequency_penalty": [-100, np.float16(2)],
    "logit_bias": [{}, {0: 1}, {np.int32(3): np.float32(1.5)}, {7: -INF}],
    "allowed_tokens": [None, [0], (1, 2), np.array([1, 2]), {3}, range(4)],
    "no_repeat_ngram_size": [0, 3, np.int64(2)],
    "seed": [None, 0, 2**64 - 1, np.int32(7), np.uint64(2**64 - 1), np.uint8(1)],
    "max_tokens": [None, 1, np.int64(9)],
    "min_tokens": [0, 1, np.int64(9), 256],
    "stop": ["", "a", ["a", "b"], ("a",), []],
    "include_stop": [True, np.bool_(False)],
    "skip_special_tokens": [False, np.bool_(True)],
    "stop_ids": [(), [0], np.array([4], np.int32), {5}],
    "ignore_eos": [True, np.bool_(True)],
    "n": [1, 1024, np.int8(3)],
    "logprobs": [True, np.bool_(False)],
    "top_logprobs": [0, 100, np.int16(5)],
    "prompt_logprobs": [None, 0, 100, np.int16(5)],
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
def test_sense_is_kept_as_plain_python_and_travels_as_json(name: str, value: Any) -> None:
    params = SamplingParams(**{name: value})
    kept = getattr(params, name)
    written = json.dumps(params.to_dict(), allow_nan=False)
    assert SamplingParams.from_dict(json.loads(written)) == params
    if isinstance(value, (int, float, np.number)):
        assert kept == value
        assert not isinstance(kept, np.generic)


def test_stop_is_a_tuple_of_texts() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop="").stop_strings == ()
    assert SamplingParams(stop=["a", "bc"]).stop_strings == ("a", "bc")


@pytest.mark.parametrize(
    ("given", "field", "kept"),
    [
        *[({name: None}, name, off) for name, off in (("top_k", 0), ("top_p", 1.0), ("top_n_sigma", 0.0))],
        *[
            ({f"{name}_penalty": None}, f"{name}_penalty", off)
            for name, off in (("repetition", 1.0), ("presence", 0.0))
        ],
        *[({name: None}, name, ()) for name in ("stop", "stop_ids", "bad_words", "rules")],
        ({"top_k": -1}, "top_k", 0),
        ({"logit_bias": None}, "logit_bias", {}),
        ({"bad_words": "a b"}, "bad_words", ("a b",)),
    ],
)
def test_what_other_tools_turn_off_with_is_taken(given: dict[str, Any], field: str, kept: Any) -> None:
    params = SamplingParams(**given)
    assert getattr(params, field) == kept
    assert params == SamplingParams(**{field: kept})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_new_tokens": 5}, "no max_new_tokens: use max_tokens"),
        ({"max_completion_tokens": 5}, "use max_tokens"),
        ({"stop_token_ids": [1]}, "use stop_ids"),
        ({"do_sample": True}, "use temperature: 0 is greedy"),
        ({"best_of": 2}, "use n"),
        ({"repeat_penalty": 1.1}, "use repetition_penalty"),
        ({"bad_words_ids": [[1]]}, "use bad_words"),
        ({"guided_json": "{}"}, "LogitRule"),
        ({"temprature": 1}, "did you mean temperature?"),
        ({"max_new_token": 1}, "did you mean max_tokens?"),
        ({"zzz": 1}, "it takes temperature, top_n_sigma"),
        ({"top_p": 0}, "use temperature=0 or top_k=1"),
        ({"temperature": -1}, "temperature=-1 is out of range: give a number at least 0 and at most 100 (0 is greedy"),
        ({"logprobs": 5}, "use logprobs=True and top_logprobs=5"),
        ({"seed": -1}, "None draws one"),
        ({"max_tokens": -1}, "None decodes to the end of the context"),
        ({"min_tokens": 300}, "min_tokens=300 is more than max_tokens=256"),
    ],
)
def test_other_tools_spellings_are_answered_with_ours(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**given)
    assert says in str(caught.value)
    if set(given) <= set(SamplingParams.__dataclass_fields__):
        assert caught.value.parameter == next(iter(given))


def test_every_name_used_elsewhere_leads_to_one_of_ours() -> None:
    assert not set(ELSEWHERE) & set(SamplingParams.__dataclass_fields__)
    ours = (*SamplingParams.__dataclass_fields__, "Engine.", "nothing:")
    assert all(any(name in meaning for name in ours) for meaning in ELSEWHERE.values())


def test_no_name_means_two_parameters() -> None:
    names = [name for parameter in PARAMETERS.values() for name in (parameter.name, *parameter.names)]
    assert not set(names) & set(ELSEWHERE)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_definition_is_the_fields(name: str) -> None:
    parameter, f = PARAMETERS[name], SamplingParams.__dataclass_fields__[name]
    default = f.default_factory() if f.default is dataclasses.MISSING else f.default
    assert parameter.default == default
    assert parameter.checked(default) == default
    assert (parameter.none == "value") == ("None" in f.type)
    assert name in FILTERS or not SamplingParams().with_(**{name: default}).filtered


def test_a_class_of_frozen_slots_stays_one() -> None:
    """The errors above are not bought with the dataclass's own nature."""
    params = SamplingParams(seed=3)
    assert "__dict__" not in dir(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params
    assert list(inspect.signature(SamplingParams).parameters) == list(SamplingParams.__dataclass_fields__)
    with pytest.raises(ParameterError, match="by name"):
        SamplingParams(0.5)  # type: ignore[misc]
    with pytest.raises(ParameterError, match="use max_tokens"):
        params.with_(max_new_tokens=3)


class Nothing:
    """A rule that changes nothing."""

    def start(self, prompt: Any) -> None: ...
    def advance(self, state: None, token: int) -> None: ...
    def apply(self, state: None, logits: Any) -> None: ...


def test_rules_travel_by_name_only() -> None:
    params = SamplingParams(rules=[Nothing()], temperature=0.5)
    written = json.loads(json.dumps(params.to_dict()))
    assert written["rules"] == ["Nothing"]
    assert SamplingParams.from_dict(written, params.rules) == params
    for rules in ([], [Nothing(), Nothing()], [object()]):
        with pytest.raises(ParameterError, match="give the same rules"):
            SamplingParams.from_dict(written, rules)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="use max_tokens"):
        SamplingParams.from_dict({"max_new_tokens": 3})


GENERATION = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 2048, "suppress_tokens": [7],
    "eos_token_id": [1, 2], "transformers_version": "5.0", "num_beams": 1, "typical_p": 0.9,
}  # fmt: skip


def test_what_a_model_recommends_is_taken_and_the_rest_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=2048, logit_bias={7: -INF})
    assert SamplingParams.from_model(GENERATION) == expected
    assert [record.getMessage() for record in caplog.records] == [
        "not taken from the model's generation_config: typical_p=0.9"
    ]
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))

    class Info:
        name = str(tmp_path)

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return GENERATION

    for source in (tmp_path, str(tmp_path), tmp_path / "generation_config.json", Info(), Config()):
        assert SamplingParams.from_model(source, top_k=5, seed=1) == expected.with_(top_k=5, seed=1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.9, "top_k": 5, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.3}, {"temperature": 0.3}),
        ({"top_p": 0.9, "temperature": None}, {"temperature": 1.0, "top_p": 0.9}),
        ({"min_new_tokens": 3, "stop_strings": ["x"], "bad_words_ids": [[1, 2]]}, None),
    ],
)
def test_only_what_is_written_there_is_recommended(config: dict[str, Any], expected: Any) -> None:
    found = SamplingParams.from_model(config)
    if expected is None:
        expected = {"min_tokens": 3, "stop": "x", "bad_words": [[1, 2]]}
    assert found == (expected if isinstance(expected, SamplingParams) else SamplingParams(**expected))


def test_a_model_that_recommends_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "model.gguf").touch()
    sources = (
        tmp_path, tmp_path / "broken.json", tmp_path / "list.json", tmp_path / "model.gguf", "demo", "no/such", 5,
    )  # fmt: skip
    for source in sources:
        with pytest.raises(ParameterError, match="generation_config"):
            SamplingParams.from_model(source)
    with pytest.raises(ParameterError, match=r"top_p=1\.5"):
        SamplingParams.from_model({"top_p": 1.5})


def test_messages_spell_arguments_for_their_audience() -> None:
    inner = ModelError("no backend for ", Argument("dtype", "float16"))
    error = ParameterError("prompt 3: ", inner, ": use ", Argument("backend", "transformers"), " or ", Argument("raw"))
    assert str(error) == "prompt 3: no backend for dtype='float16': use backend='transformers' or raw"
    told = error.spelled(lambda a: f"--{a.name} {a.value}" if a.has_value else f"--{a.name}")
    assert told == "prompt 3: no backend for --dtype float16: use --backend transformers or --raw"
    assert (error.parameter, ParameterError("x").parameter) == ("dtype", None)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_top_logprobs_imply_logprobs() -> None:
    assert [
        SamplingParams(logprobs=a, top_logprobs=k).wants_logprobs for a, k in ((False, 0), (True, 0), (False, 1))
    ] == [False, True, True]


def test_drafts_are_views_of_rows_and_name_their_sources() -> None:
    drafts = Drafts.chains([[1, 2, 3], [], [4]], "ngram")
    assert [drafts.row(i).tokens for i in range(3)] == [[1, 2, 3], [], [4]]
    assert drafts.sources_of(0)[2] == "ngram"
    assert drafts.row(0).children(-1) == [0]
    assert drafts.row(0).children(2) == []
    assert Drafts.empty(2).row(1).children(-1) == []
    tree = Draft([5, 5, 6, 7], [-1, -1, 0, 1])
    assert (tree.children(-1), tree.children(1), tree.path(3)) == ([0, 1], [3], [1, 3])


def test_verdicts_of_different_depths_travel_together() -> None:
    rows = [Verdict(np.array(t, np.int32), np.array(p, np.int32)) for t, p in (([1, 2, 3], [0, 4]), ([9], []))]
    together = Verdicts.of(rows)
    assert [(v.tokens.tolist(), v.path.tolist(), v.accepted) for v in together] == [
        ([1, 2, 3], [0, 4], 2),
        ([9], [], 0),
    ]
