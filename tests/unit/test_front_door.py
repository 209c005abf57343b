"""The API as people meet it: keywords, errors, rules that are functions, what a notebook shows; async as sync."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from outpace import AsyncEngine, Engine, ParameterError, RuleError, SamplingParams
from outpace.common.progress import progress
from outpace.drafters.lookup.ngram import NgramDrafter
from tests.toy import ToyModel, ToyTokenizer

# Of whoever runs the steps, in one thread: ``AsyncEngine.ask`` reaches them.
DRIVEN = {"add", "prepare", "submit", "step", "idle", "policy", "probabilities", "on_step", "on_result"}


def make() -> Engine:
    return Engine(ToyModel(6, memory=3), ToyTokenizer(), drafter=NgramDrafter(), size=4)  # type: ignore[arg-type]


def breaks(tokens: Any, logits: Any) -> None:
    if len(tokens) > 4:
        raise ValueError("blown")


def signature(kind: type, name: str) -> list[tuple[str, ...]]:
    """The parameters of a method or property, and its result, as they are written."""
    method: Any = getattr(kind, name)
    found = inspect.signature(method.fget if isinstance(method, property) else method)
    parts = [(p.name, str(p.kind), repr(p.default), str(p.annotation)) for p in found.parameters.values()]
    written = [*parts, (str(found.return_annotation),)]
    return [tuple(text.replace("Async", "").replace("SequenceOf", "Sequence") for text in part) for part in written]


def test_async_engine_has_the_methods_of_engine() -> None:
    """With the same parameters, defaults and results; a property is a method there, since one must await it."""
    ours, theirs = ({name for name in dir(kind) if not name.startswith("_")} for kind in (AsyncEngine, Engine))
    assert theirs - ours == DRIVEN
    for name in theirs & ours:
        assert signature(AsyncEngine, name) == signature(Engine, name), name


def test_what_async_engine_mirrors_answers_the_same() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make()) as engine:
            asked: dict[str, Any] = {"max_tokens": 5, "temperature": 1.0, "seed": 3}
            with make() as alone:
                expected = alone.generate_many(["ab", "ba"], n=2, **asked)
                prompt = alone.encode("ab", raw=True)
            found = await engine.generate_many(["ab", "ba"], n=2, **asked)
            assert [result.token_ids for result in found] == [result.token_ids for result in expected]
            assert np.array_equal(await engine.encode("ab", raw=True), prompt)
            stream = engine.stream("ab", max_tokens=None, ignore_eos=True)
            first = await anext(stream)
            assert (await engine.request(first.request)).params.ignore_eos
            assert (await engine.snapshot()).running == 1
            (last,) = await engine.cancel(first.request)
            assert last.finish_reason == "cancelled"
            assert [delta async for delta in stream][-1].finish_reason == "cancelled"
            await engine.check()
            with pytest.raises(RuleError, match="blown"):
                await engine.generate("ab", rules=[breaks])
            with pytest.raises(RuleError, match="blown"):
                _ = [delta async for delta in engine.stream("ab", rules=[breaks])]
            assert (await engine.generate("ab", rules=[breaks], errors="return")).finish_reason == "error"
            assert "running" in repr(engine)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_keywords_are_parameters() -> None:
    with make() as engine:
        params = SamplingParams(max_tokens=9, temperature=1.0, seed=4)
        assert (
            engine.generate("ab", max_tokens=9, temperature=1.0, seed=4).token_ids
            == engine.generate("ab", params).token_ids
        )
        assert engine.generate("ab", params, max_tokens=2).completion_tokens == 2
        assert [d.sample for d in engine.stream("ab", max_tokens=1, n=2)] == [0, 1]
        refused: Any = engine.generate
        for keywords, says in (
            ({"max_token": 8}, "a request has no max_token: did you mean max_tokens?"),
            ({"max_new_tokens": 8}, "use max_tokens"),
            ({"draffter": "none"}, "did you mean drafter?"),
            ({"n": 2}, "n=2 samples make several results: use generate_many"),
            ({"params": 8}, "keywords such as max_tokens=8"),
            ({"errors": "ignore"}, "errors='ignore' is unknown: use raise"),
        ):
            with pytest.raises(ParameterError) as caught:
                refused("ab", **keywords)
            assert says in str(caught.value)
        with pytest.raises(ParameterError, match="one text: use generate"):
            engine.generate_many("ab")
        assert engine.idle


def test_a_request_that_ends_in_an_error_raises_it() -> None:
    with make() as engine:
        for ask in (engine.generate, lambda *a, **k: list(engine.stream(*a, **k))):
            with pytest.raises(RuleError, match="breaks raised ValueError: blown"):
                ask("ab", rules=[breaks])
        params = [SamplingParams(max_tokens=2), SamplingParams(rules=[breaks])]
        with pytest.raises(RuleError) as caught:
            engine.generate_many(["a", "b"], params)
        assert "prompt 2 of 2" in caught.value.__notes__[0]
        assert engine.idle
        good, bad = engine.generate_many(
            ["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(rules=[breaks])], errors="return"
        )
        assert (good.error, bad.finish_reason) == (None, "error")
        assert list(engine.stream("ab", rules=[breaks], errors="return"))[-1].result is not None


def test_a_function_is_a_rule_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from tests.unit.test_front_door import make
def only_threes(tokens, logits):
    assert tokens.dtype == "int32" and tokens[0] == 0, tokens
    logits[:3] = logits[4:] = float("-inf")
with make() as engine:
    assert set(engine.generate([0, 1], max_tokens=6, rules=[only_threes]).token_ids) == {3}
    assert engine.generate([0, 1], max_tokens=2, rules=[lambda tokens, logits: -logits]).token_ids
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_for_transformers_says_what_to_install() -> None:
    program = """
import sys
sys.modules["torch"] = None
import outpace
for name in ("generate", "patch", "stats"):
    try:
        getattr(outpace, name)("Hello")
    except outpace.OutpaceError as error:
        assert isinstance(error, ImportError)
        assert f"outpace.{name} is for transformers models and needs torch: " in str(error), error
        assert 'Engine.load("demo").generate("Hello") needs neither' in str(error), error
    else:
        raise AssertionError(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_person_sees_of_values() -> None:
    with make() as engine:
        result = engine.generate("abab", max_tokens=40, ignore_eos=True)
        assert "".join(piece for piece, _ in result.pieces) == result.text
        assert {source for _, source in result.pieces} == {"ngram", "target"} == set(result.sources)
        shown = result._repr_html_()
        assert shown.count("<span") == 1 + sum(source == "ngram" for _, source in result.pieces)  # and the legend
        assert f"{result.stats.tokens_per_step:.2f} tokens a step" in shown
        failed = engine.generate("ab", rules=[breaks], errors="return")._repr_html_()
        assert "error: breaks raised" in failed
        assert len(repr(result)) < 300
        assert "seed" not in repr(result) + result._repr_html_()  # a greedy answer does not depend on it
        assert "0 running, 0 waiting" in repr(engine)
        assert repr(engine.stats).startswith("Stats(2 answers, 4")
        made = SamplingParams(max_tokens=8, stop="x")
        assert repr(made) == "SamplingParams(max_tokens=8, stop=('x',))"


def test_a_notebook_shows_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        engine.generate_many(["a", "b"], max_tokens=3)
        assert capsys.readouterr().err == ""
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
        monkeypatch.setattr("outpace.common.progress._EVERY", 0)
        engine.generate_many(["a", "b"], max_tokens=3)
        assert "answers ##" in capsys.readouterr().err
        with progress("answers", 1, shown=False) as advance:
            advance(1)
        assert capsys.readouterr().err == ""
