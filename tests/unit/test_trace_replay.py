"""A replay finds nothing where nothing changed, and the very place where something did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace.engine.engine import Engine
from outpace.errors import ParameterError
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.measure.replay import ReplayDrafter, Report, replay
from outpace.measure.tracefile import Trace, TracedRow, read
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
@pytest.mark.parametrize("halving", [False, True])
def test_a_run_replayed_is_identical(tmp_path: Path, acceptance: Any, halving: bool) -> None:
    """Greedy and sampled, chains and trees, n = 3, penalties, stops, several at once; under any load."""
    trace, _, results = record(tmp_path / "run.trace", made=engine(halving=halving), acceptance=acceptance)
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
    assert (departure.request, departure.sample, departure.index) == (0, 0, index)
    assert departure.tokens == (output[index], other)
    assert departure.gap == pytest.approx(0.25, abs=1e-6)
    assert not departure.near_tie
    step = next(s for s in trace.steps if s.index == departure.step)
    row = next(r for r in step.rows if (r.request, r.sample) == (0, 0))
    assert row.start <= len(prompt) + index < row.start + row.gained


def tampered(trace: Trace, change: Callable[[TracedRow], TracedRow | None], nth: int = 2) -> Trace:
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
    trace, _, _ = record(tmp_path / "run.trace", REQUESTS[:1], made=engine(halving=True))

    def edit(row: TracedRow) -> TracedRow:
        if change == "token":
            return replace(row, verdict=(*row.verdict[:-1], (row.verdict[-1] + 1) % VOCAB))
        if change == "path":
            return replace(row, path=())
        return replace(row, gained=row.gained - 1)

    (departure,) = again(tampered(trace, edit, nth=1)).departures
    assert departure.request == 0
    assert (departure.gap is not None) == (change == "token")
    assert ("path" in departure.why) == (change != "token")


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
    trace, steps, _ = record(tmp_path / "run.trace", made=engine(halving=True))
    drafter = ReplayDrafter(trace)
    assert drafter.size == max(int(step.kept.widths.max(initial=0)) for step in steps)
    drafted = 0
    seen: list[tuple[int, int]] = []
    with Engine(ToyModel(VOCAB), Spelled(), drafter=drafter, size=drafter.size) as made:
        made.on_step = lambda step: seen.extend(
            zip(step.kept.widths.tolist(), step.verdicts.accepted.tolist(), strict=True)
        )
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
    assert departure.index == 5
    assert departure.tokens == (output[5], other)
    assert departure.gap == pytest.approx(scores.max() - scores[output[5]])
