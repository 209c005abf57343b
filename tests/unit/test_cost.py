"""What a forward costs: measured on a model, kept on disk, and the little model fitted to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace.control import cost as costs
from outpace.control.cost import Cost
from outpace.models.base import Batch, HostOutput
from tests.toy import BYTES, ToyModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    return tmp_path


class Clocked(ToyModel):
    """Takes, on a clock of its own, exactly what a cost says."""

    def __init__(self, truth: Cost, **options: Any) -> None:
        super().__init__(11, max_length=2000, **options)
        self.truth, self.now = truth, 0.0

    def forward(self, batch: Batch) -> HostOutput:
        widths = np.diff(batch.starts).tolist()
        contexts = [self.kv.length(int(batch.row[start])) for start in batch.starts[:-1]]
        self.now += self.truth.forward(widths, contexts)
        return super().forward(batch)


def clocked(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Clocked:
    truth = Cost((1, 2, 8, 16, 32, 64), (2.0, 2.2, 3.2, 5.6, 11.0, 22.0), 0.1, 9e-4, 1.5e-4)
    model = Clocked(truth, **options)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: model.now)
    return model


def test_measuring_finds_what_forwards_take_and_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = clocked(monkeypatch)
    found = costs.measure(model)
    assert model.kv.rows == []
    for width in (1, 2, 4, 8, 16, 31, 32):
        for context in (0, 100, 1000, 4000):
            expected = model.truth.forward([width], [context])
            assert found.forward([width], [context]) == pytest.approx(expected, rel=0.02), (width, context)
    four = ([1] * 4, [400] * 4)
    assert found.forward(*four) == pytest.approx(model.truth.forward(*four), rel=0.02)


def test_a_cost_is_kept_and_measured_anew_when_asked_or_damaged(
    monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = clocked(monkeypatch)
    first = costs.of(model)
    forwards = len(model.forwards)
    assert costs.of(model) == first
    assert len(model.forwards) == forwards
    costs.of(model, again=True)
    assert len(model.forwards) > forwards
    (path,) = (cache / "costs").iterdir()
    for damage in ("", "[1]", json.dumps({**json.loads(path.read_text()), "seconds": []})):
        path.write_text(damage)
        assert costs.of(model).seconds == pytest.approx(first.seconds)
        assert json.loads(path.read_text())["widths"]


def test_too_little_memory_for_a_row_gives_a_flat_guess(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    model = clocked(monkeypatch, limit=20 * BYTES)
    guess = costs.of(model)
    assert guess.ratio(8) > 1
    assert "not measured" in caplog.text
    assert not (cache / "costs").exists()


def test_beyond_the_table_the_last_slope_goes_on() -> None:
    cost = Cost((1, 2, 4), (1.0, 1.5, 3.5))
    assert [cost.width(n) for n in (0, 1, 2, 3, 4, 5, 9)] == pytest.approx([0, 1, 1.5, 2.5, 3.5, 4.5, 8.5])
    assert cost.forward([2, 2], [0, 0]) == cost.width(4)
