"""A replay finds nothing where nothing changed, and the very place where something did; two runs part by a cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace.engine.engine import Engine
from outpace.engine.request import RowRecord
from outpace.errors import ParameterError
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.measure.explain import Comparison, explain
from outpace.measure.replay import ReplayDrafter, Report, replay
from outpace.measure.same import Target
from outpace.measure.trace import Trace, read
from tests.toy import ToyModel
from tests.tracing import REQUESTS, VOCAB, Spelled, Swapped, engine, ids, record


def again(trace: Trace, model: ToyModel | None = None, **options: Any) -> Report:
    drafter = ReplayDrafter(trace)
    model = model or ToyModel(VOCAB)
    with Engine(model, Spelled(), drafter=drafter, size=drafter.size, **options) as made:
        report = replay(trace, made, drafter)
        assert made.on_step is None
        assert made.idle
        made.check()
    json.dumps(report.to_dict(), allow_nan=False)
    return report


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("size", [5, "auto"])
def test_a_run_replayed_is_identical(tmp_path: Path, acceptance: Any, size: int | str) -> None:
    """Greedy and sampled, chains and trees, n = 3, penalties, stops, several at once; under any load."""
    trace, _, results = record(tmp_path / "run.trace", made=engine(size=size), acceptance=acceptance)
    report = again(trace)
    assert report.identical
    assert not report.skipped
    assert (report.samples, report.tokens) == (len(results), sum(r.completion_tokens for r in results))
    assert report.steps == sum(len(step.rows) for step in trace.steps)
    assert again(trace, max_rows=1, prefill_chunk=1, prefix_rows=0).identical


def test_a_plain_run_replays_plainly(tmp_path: Path) -> None:
    trace, _, _ = record(tmp_path / "run.trace", made=engine(size=0))
    assert ReplayDrafter(trace).size == 0
    assert again(trace).identical


@pytest.mark.parametrize("index", [0, 4, 9])
def test_a_model_that_changed_is_caught_at_the_token(tmp_path: Path, index: int) -> None:
    trace, _, _ = record(tmp_path / "run.trace", REQUESTS[:2])
    prompt, output = REQUESTS[0][0], trace.outputs()[0, 0]
    other = (output[index] + 1) % VOCAB
    report = again(trace, Swapped([*prompt, *output[:index]], other, by=0.25))
    assert not report.identical
    (departure,) = report.departures
    found = departure.difference
    assert (departure.request, departure.sample, found.what, found.index) == (0, 0, "token", index)
    assert found.values == (output[index], other)
    assert found.gap == pytest.approx(0.25, abs=1e-6)
    assert not found.near_tie
    said = f"request 0, step {departure.step}: DIFFERENT at token {index} ({output[index]} / {other}, score gap 0.25)"
    assert str(departure) == said
    step = next(s for s in trace.steps if s.index == departure.step)
    row = next(r for r in step.rows if (r.request, r.sample) == (0, 0))
    assert row.start <= len(prompt) + index < row.start + row.gained


def tampered(trace: Trace, change: Callable[[RowRecord], RowRecord | None], nth: int = 2) -> Trace:
    """The trace with the nth drafted row of request 0 changed."""
    steps, seen = [], -1
    for step in trace.steps:
        rows = list(step.rows)
        for i, row in enumerate(rows):
            if row.request == 0 and row.path:
                seen += 1
                if seen == nth and (changed := change(row)) is not None:
                    rows[i] = changed
        steps.append(replace(step, rows=tuple(rows)))
    return replace(trace, steps=tuple(steps))


@pytest.mark.parametrize("change", ["token", "path", "gained"])
def test_a_record_that_was_changed_is_caught(tmp_path: Path, change: str) -> None:
    trace, _, _ = record(tmp_path / "run.trace", REQUESTS[:1], made=engine(size="auto"))

    def edit(row: RowRecord) -> RowRecord:
        if change == "token":
            return replace(row, verdict=(*row.verdict[:-1], (row.verdict[-1] + 1) % VOCAB))
        if change == "path":
            return replace(row, path=())
        return replace(row, gained=row.gained - 1)

    (departure,) = again(tampered(trace, edit, nth=1)).departures
    assert departure.request == 0
    assert departure.difference.what == change
    assert (departure.difference.gap is not None) == (change == "token")


def test_a_trace_that_was_cut_or_cancelled_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    whole, _, _ = record(path, REQUESTS[:2])
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b'"step":3')])
    trace = read(path)
    assert trace.cut is not None
    report = again(trace)
    assert report.identical
    assert 0 < report.tokens < sum(len(tokens) for tokens in whole.outputs().values())
    assert report.tokens == sum(len(tokens) for tokens in trace.outputs().values())


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    class Forbids:
        def start(self, prompt: Any) -> None:
            return None

        def advance(self, state: None, token: int) -> None:
            return None

        def apply(self, state: None, logits: Any) -> None:
            logits[0] = -1e30

    requests = [([1, 2], {"max_tokens": 4, "rules": [Forbids()]}), ([1, 2], {"max_tokens": 4})]
    trace, _, _ = record(tmp_path / "run.trace", requests)
    report = again(trace)
    assert report.identical
    assert [request for request, _ in report.skipped] == [0]
    assert "Forbids" in report.skipped[0][1]
    with pytest.raises(ParameterError, match="Forbids"):
        again(replace(trace, requests=trace.requests[:1]))
    drawn = tampered(trace, lambda row: None)
    rows = tuple(replace(r, drawn=True) for r in drawn.steps[-1].rows)
    drawn = replace(drawn, steps=(*drawn.steps[:-1], replace(drawn.steps[-1], rows=rows)))
    drawn = replace(drawn, requests=tuple(replace(r, acceptance="rejection") for r in drawn.requests[1:]))
    with pytest.raises(ParameterError, match="distributions, which no trace holds"):
        again(drawn)


def test_the_drafter_proposes_what_was_verified_and_nothing_else(tmp_path: Path) -> None:
    trace, steps, _ = record(tmp_path / "run.trace", made=engine(size="auto"))
    drafter = ReplayDrafter(trace)
    assert drafter.size == max(len(row.kept) for step in steps for row in step.rows)
    drafted = 0
    seen: list[tuple[int, int]] = []
    with Engine(ToyModel(VOCAB), Spelled(), drafter=drafter, size=drafter.size) as made:
        made.on_step = lambda step: seen.extend((len(row.kept), len(row.path)) for row in step.rows)
        request = trace.requests[0]
        drafter.follow(made.add(list(request.prompt), request.sampling()), request.id)
        while not made.idle:
            made.step()
    own = [row for step in trace.steps for row in step.rows if row.request == 0]
    drafted = sum(len(row.kept) for row in own)
    assert drafted > 0
    assert seen == [(len(row.kept), len(row.path)) for row in own]


def test_gaps_are_measured_with_the_requests_own_noise_and_rules(tmp_path: Path) -> None:
    trace, _, _ = record(tmp_path / "run.trace", REQUESTS[3:4])
    request, output = trace.requests[0], trace.outputs()[0, 0]
    params, prompt = request.sampling(), list(request.prompt)
    chooser = Chooser.start(params, Noise(request.seed, 0), rules_for(params, VOCAB), ids(*prompt)).after(output[:5])
    other = next(token for token in (2, 3) if token != output[5])
    model = Swapped([*prompt, *output[:5]], other, by=60.0)  # whatever the noise says
    (departure,) = again(trace, model).departures
    scores = chooser.scores(model.logits_after([*prompt, *output[:5]]))
    assert departure.difference.index == 5
    assert departure.difference.values == (output[5], other)
    assert departure.difference.gap == pytest.approx(scores.max() - scores[output[5]])


PROMPT = [1, 2, 3, 4, 5]
HOT = {"max_tokens": 12, "temperature": 0.9, "seed": 4}


def one(path: Path, params: Mapping[str, Any] = HOT, prompt: list[int] = PROMPT, **more: Any) -> Trace:
    """One request's trace; ``size`` only changes how it is drafted."""
    made = engine(**{k: more.pop(k) for k in ("size", "seed") if k in more})
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
    b, _, _ = record(tmp_path / "b.trace", made=engine(size="auto", max_rows=2))
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
