"""Two runs: where they part, and the cause by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace.measure.explain import Comparison, explain
from outpace.measure.replay import Target
from outpace.measure.tracefile import Trace, read
from tests.toy import ToyModel
from tests.tracing import REQUESTS, VOCAB, Swapped, engine, record

PROMPT = [1, 2, 3, 4, 5]
HOT = {"max_tokens": 12, "temperature": 0.9, "seed": 4}


def one(path: Path, params: Mapping[str, Any] = HOT, prompt: list[int] = PROMPT, **more: Any) -> Trace:
    """One request's trace; ``size`` and ``halving`` only change how it is drafted."""
    made = engine(**{k: more.pop(k) for k in ("size", "halving", "seed") if k in more})
    return record(path, [(prompt, dict(params))], made=made, **more)[0]


def with_header(trace: Trace, **changes: Any) -> Trace:
    model = {**trace.header["model"], **{k: v for k, v in changes.items() if k != "outpace"}}
    top = {"outpace": changes["outpace"]} if "outpace" in changes else {}
    return replace(trace, header={**trace.header, **top, "model": model})


def first(found: Comparison) -> Any:
    json.dumps(found.to_dict(), allow_nan=False)
    (explanation,) = found.explanations
    return explanation


def test_the_same_run_drafted_in_another_way_is_identical(tmp_path: Path) -> None:
    a, _, _ = record(tmp_path / "a.trace")
    b, _, _ = record(tmp_path / "b.trace", made=engine(size=3, halving=True, max_rows=2))
    found = explain(a, b)
    assert found.identical
    assert len(found.explanations) == 7
    assert not any(e.causes for e in found.explanations)
    assert "identical, 14 tokens" in str(found.explanations[0])
    reordered, _, _ = record(tmp_path / "c.trace", REQUESTS[::-1])
    assert explain(a, reordered).identical
    fewer, _, _ = record(tmp_path / "d.trace", REQUESTS[1:3])
    assert explain(a, fewer).alone == ((0, 3, 4), ())


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        ({"params": {**HOT, "temperature": 1.4}}, "parameters", "temperature=0.9 / 1.4"),
        ({"params": {**HOT, "repetition_penalty": 3.0}}, "parameters", "repetition_penalty=1.0 / 3.0"),
        ({"params": {**HOT, "seed": 5}}, "seed", "4 / 5"),
        ({"prompt": [1, 2, 6, 4, 3]}, "prompt", "from token 2 of 5 / 5"),
        ({"acceptance": "rejection"}, "acceptance", "coupled / rejection"),
    ],
)
def test_what_was_asked_differently_is_named(tmp_path: Path, change: dict[str, Any], cause: str, said: str) -> None:
    a, b = one(tmp_path / "a.trace"), one(tmp_path / "b.trace", **change)

    def never() -> Target | None:
        raise AssertionError("no score can tell more")

    explanation = first(explain(a, b, never))
    assert not explanation.identical
    assert explanation.causes[0].name == cause
    assert said in str(explanation)
    assert a.outputs()[0, 0][: explanation.index] == b.outputs()[0, 0][: explanation.index]
    assert a.outputs()[0, 0][explanation.index] == explanation.tokens[0] != explanation.tokens[1]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"outpace": "9.9"}, "version"),
        ({"arithmetic": 2}, "arithmetic"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"kv_bytes_per_position": 4}, "KV bytes a position"),
        ({"backend": "native"}, "backend"),
    ],
)
@pytest.mark.parametrize("by", [1e-5, 2.0])
def test_other_arithmetic_explains_a_near_tie_and_nothing_more(
    tmp_path: Path, change: dict[str, Any], cause: str, by: float
) -> None:
    a, b, model = pair(tmp_path, by)
    a = with_header(a, arithmetic=1)
    explanation = first(explain(a, with_header(b, **{"arithmetic": 1, **change}), lambda: (model, None)))
    assert explanation.causes[0].name == cause
    assert explanation.index == 6
    assert (explanation.causes[-1].name == "bug") == (by > 1)
    assert explanation.gap == pytest.approx(by, rel=0.1)


def pair(folder: Path, by: float) -> tuple[Trace, Trace, ToyModel]:
    """Two greedy runs that part at token 6: there a rival is ``by`` behind the best for one, ahead for the other. The
    first one's model."""
    params = {"max_tokens": 12}
    output = one(folder / "a.trace", params).outputs()[0, 0]
    prefix, rival = [*PROMPT, *output[:6]], (output[6] + 1) % VOCAB
    models = Swapped(prefix, rival, by=-by), Swapped(prefix, rival, by=by)
    a, b = (
        record(folder / name, [(PROMPT, params)], made=engine(model=model), scores=True)[0]
        for name, model in zip(("a.trace", "b.trace"), models, strict=True)
    )
    return a, b, models[0]


@pytest.mark.parametrize(
    ("by", "backend", "cause"), [(1e-5, "toy", "near-tie"), (2.0, "toy", "bug"), (1e-5, "native", "bug")]
)
def test_where_everything_is_the_same_the_gap_decides(tmp_path: Path, by: float, backend: str, cause: str) -> None:
    a, b, model = pair(tmp_path, by)
    a, b = with_header(a, backend=backend), with_header(b, backend=backend)
    explanation = first(explain(a, b, lambda: (model, None)))
    assert explanation.index == 6
    assert explanation.causes[0].name == cause
    assert explanation.gap == pytest.approx(by, rel=0.1)
    recorded = first(explain(a, b))  # no model at hand: the margins that were recorded
    assert recorded.causes[0].name == cause
    assert recorded.at_least
    bare = first(explain(replace(a, margins={}), replace(b, margins={})))
    assert bare.causes[0].name == "unknown"
    assert bare.gap is None


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        ({"params": {**HOT, "max_tokens": 7}}, "parameters", "max_tokens=12 / 7"),
        ({"params": {**HOT, "stop_ids": list(range(VOCAB))}}, "parameters", "stop_ids="),
    ],
)
def test_one_that_ended_earlier_says_why(tmp_path: Path, change: dict[str, Any], cause: str, said: str) -> None:
    explanation = first(explain(one(tmp_path / "a.trace"), one(tmp_path / "b.trace", **change)))
    assert explanation.tokens[1] is None
    assert explanation.causes[0].name == cause
    assert said in str(explanation)


def test_one_that_was_cut_off_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    a = one(path)
    data = path.read_bytes()
    (tmp_path / "b.trace").write_bytes(data[: data.index(b'"step":3')])
    explanation = first(explain(a, read(tmp_path / "b.trace")))
    assert explanation.causes[0].name == "ended"
    assert "b.trace has no result" in str(explanation)
    ended = replace(a, steps=a.steps[:-2])
    assert first(explain(a, ended)).causes[0].name == "bug"


def test_another_model_is_named(tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.trace"), one(tmp_path / "b.trace", seed=3)
    explanation = first(explain(with_header(a, fingerprint="aa"), with_header(b, fingerprint="bb")))
    assert (explanation.causes[0].name, explanation.causes[0].detail) == ("model", "aa / bb")
    assert explanation.gap is None
