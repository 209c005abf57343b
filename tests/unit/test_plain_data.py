"""Answers, their parts and errors are plain data: they cross processes, and are copied and written down."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import outpace.errors
import outpace.text.answer
from outpace import Engine, OutpaceError, ParameterError
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.results import Delta, Result
from outpace.errors import Argument
from tests.toy import ToyModel, ToyTokenizer

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "oldest pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def make() -> Engine:
    return Engine(ToyModel(6, memory=3), ToyTokenizer(), drafter=NgramDrafter(), size=4)  # type: ignore[arg-type]


def blown(tokens: Any, logits: Any) -> None:
    raise ValueError("blown")


def answers() -> list[Delta]:
    """Deltas of a long answer, with all that may be asked for, and of one that ends in an error."""
    with make() as engine:
        whole = engine.stream(
            "abab",
            max_tokens=40,
            ignore_eos=True,
            top_logprobs=2,
            prompt_logprobs=1,
            stop="never",
            temperature=0.5,
            seed=3,
        )
        failed = engine.stream("ab", rules=[blown], errors="return")
        return [*whole, *failed]


@pytest.fixture(scope="module")
def deltas() -> list[Delta]:
    return answers()


@pytest.mark.parametrize("how", COPIES)
def test_answers_are_copied_whole(how: str, deltas: list[Delta]) -> None:
    for delta in deltas:
        other = COPIES[how](delta)
        assert other == delta
        assert repr(other) == repr(delta)
    for result in (delta.result for delta in deltas if delta.result is not None):
        other = COPIES[how](result)
        assert (other.pieces, str(other), other.stats) == (result.pieces, result.text, result.stats)
        assert str(other.cause) == str(result.cause)
        assert other._repr_html_() == result._repr_html_()
        assert dataclasses.replace(other) == result


def test_answers_become_dictionaries_and_json(deltas: list[Delta]) -> None:
    for delta in deltas:
        found = dataclasses.asdict(delta)
        if delta.result is not None:
            assert found["result"].pop("cause") is None or delta.result.error is not None
            assert found["result"]["text"] == delta.result.text
            assert found["result"]["stats"]["tokens"] == delta.result.stats.tokens
        assert json.loads(json.dumps(found))["token_ids"] == list(delta.token_ids)
    result = deltas[-1].result
    assert result is not None
    assert json.loads(json.dumps(result.stats.to_dict()))["requests"] == 1


def test_pieces_are_the_text_by_who_wrote_it(deltas: list[Delta], capsys: pytest.CaptureFixture[str]) -> None:
    result = next(delta.result for delta in deltas if delta.result is not None)
    assert "".join(piece for piece, _ in result.pieces) == result.text
    assert {source for _, source in result.pieces} == set(result.sources) == {"ngram", "target"}
    print(result)
    assert capsys.readouterr().out == result.text + "\n"


def in_child(prompt: str) -> Result:
    with make() as engine:
        return engine.generate(prompt, max_tokens=5, ignore_eos=True, rules=[blown] if prompt == "b" else [])


def test_results_and_errors_come_back_from_processes() -> None:
    """spawn: nothing is inherited."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(in_child, ("a",)).token_ids == in_child("a").token_ids
        with pytest.raises(OutpaceError) as there:
            pool.apply(in_child, ("b",))
    with pytest.raises(OutpaceError) as here:
        in_child("b")
    assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))


ERRORS = [
    kind
    for module in (outpace.errors, outpace.text.answer)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, OutpaceError)
]
VALUES = (..., None, 0.5, "x y", [1, "a"], {"a": (1,)}, lambda: None, make, object(), OutpaceError)


@pytest.mark.parametrize("how", COPIES)
def test_errors_keep_their_message_class_and_parameter(how: str) -> None:
    for kind in dict.fromkeys(ERRORS):
        for value in VALUES:
            inner = ParameterError("inner ", Argument("size", value))
            for error in (kind(), kind("text"), kind(Argument("seed", value), " is wrong: ", inner)):
                error.add_note("a note")
                other = COPIES[how](error)
                assert (type(other), str(other), other.parameter) == (kind, str(error), error.parameter)
                assert other.spelled(lambda a: f"--{a.name}") == error.spelled(lambda a: f"--{a.name}")
                assert other.__notes__ == ["a note"]
