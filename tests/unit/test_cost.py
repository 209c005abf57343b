"""What a forward costs: measured on a model, kept on disk, distrusted, and the little model fitted to it."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outpace.control import cost as costs
from outpace.control.adaptive import report
from outpace.control.cost import Cost
from outpace.errors import MemoryLimitError
from outpace.models.base import Batch, HostOutput, Model, ModelInfo
from tests.simulated import Driven, Machine, run, text

TRUTH = Cost((1, 2, 8, 16, 32, 64), (2e-3, 2.2e-3, 3.2e-3, 5.6e-3, 11e-3, 22e-3), 1e-4, 9e-7, 1.5e-7)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    return tmp_path


class Positions:
    """As much of a KV cache as measuring needs: lengths, and a bound in positions of one byte each."""

    recurrent = False

    def __init__(self, limit: int | None) -> None:
        self.limit, self.lengths = limit, dict[int, int]()

    def alloc(self) -> int:
        row = next(i for i in range(99) if i not in self.lengths)
        self.lengths[row] = 0
        return row

    def free(self, row: int) -> None:
        del self.lengths[row]

    def length(self, row: int) -> int:
        return self.lengths[row]

    def truncate(self, row: int, n: int) -> None:
        self.lengths[row] = n

    def growth(self, row: int, n: int) -> int:
        return n

    @property
    def bytes(self) -> int:
        return sum(self.lengths.values())

    @property
    def rows(self) -> list[int]:
        return sorted(self.lengths)


class Clocked(Model):
    """A model that takes, on a clock of its own, exactly what a cost says; ``busy``: factors of the first forwards."""

    threads, isa = 2, None  # type: ignore[assignment]

    def __init__(
        self, truth: Cost = TRUTH, *, limit: int | None = None, max_length: int = 2000, slow: float = 1.0
    ) -> None:
        self.info = ModelInfo("clocked", "toy", 11, 4, 2, max_length, (), "float32", "cpu", 1000, 1)
        self.kv, self.truth, self.now, self.slow = Positions(limit), truth, 0.0, slow
        self.forwards, self.noise, self.rng = 0, 0.0, np.random.default_rng(0)

    def forward(self, batch: Batch) -> HostOutput:
        widths = np.diff(batch.starts).tolist()
        rows = [int(batch.row[start]) for start in batch.starts[:-1]]
        if self.kv.limit is not None and self.kv.bytes + sum(widths) > self.kv.limit:
            raise MemoryLimitError("full")
        self.now += (
            self.slow
            * self.truth.forward(widths, [self.kv.lengths[row] for row in rows])
            * (1 + self.noise * float(self.rng.exponential()))
        )
        for row, width in zip(rows, widths, strict=True):
            self.kv.lengths[row] += width
        self.forwards += 1
        return HostOutput(batch.wanted, np.zeros((len(batch.wanted), 11), np.float32))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return clocked(monkeypatch)


def clocked(monkeypatch: pytest.MonkeyPatch, **options: object) -> Clocked:
    made = Clocked(**options)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: made.now)
    return made


def test_measuring_finds_what_forwards_take_and_leaves_no_row(model: Clocked) -> None:
    found = costs.measure(model)
    assert model.kv.rows == []
    assert model.now < 2
    for width in (1, 2, 4, 8, 16, 31, 32):
        for context in (0, 100, 1000, 4000):
            expected = model.truth.forward([width], [context])
            assert found.forward([width], [context]) == pytest.approx(expected, rel=0.03), (width, context)
    four = ([1] * 4, [400] * 4)
    assert found.forward(*four) == pytest.approx(model.truth.forward(*four), rel=0.03)


def test_a_noisy_moment_is_measured_until_two_rounds_agree(model: Clocked) -> None:
    costs.measure(model)
    quiet = model.forwards
    model.noise = 0.3
    found = costs.measure(model)
    assert model.forwards - quiet > quiet
    for width in (1, 4, 8, 16):
        assert found.width(width) == pytest.approx(model.truth.width(width), rel=0.25)


@pytest.mark.parametrize("slow", [1.0, 10.0, 50.0, 400.0])
def test_it_takes_under_two_seconds_or_as_long_as_a_few_forwards(monkeypatch: pytest.MonkeyPatch, slow: float) -> None:
    model = clocked(monkeypatch, slow=slow)
    told: list[str] = []
    found = costs.of(model, progress=told.append)
    one_row = slow * (TRUTH.width(32) + 2 * TRUTH.width(1))
    assert model.now < max(2.0, 1.1 * one_row)
    assert found.seconds[0] == pytest.approx(slow * 2e-3, rel=0.05)
    assert found.doubts() is None
    assert "measuring" in told[0]
    assert "measured" in told[-1]
    assert found.steady == (slow <= 10), "a fast model at a very slow moment looks like a slow one"
    again = costs.of(model)
    assert again.steady
    assert again.seconds == pytest.approx(found.seconds)


def test_a_cost_is_kept_and_measured_anew_when_asked_damaged_old_or_impossible(model: Clocked, cache: Path) -> None:
    first = costs.of(model)
    forwards = model.forwards
    assert costs.of(model) == first
    assert model.forwards == forwards
    costs.of(model, again=True)
    (path,) = (cache / "costs").iterdir()
    kept = json.loads(path.read_text())
    wrong = [
        {"seconds": []},
        {"seconds": [0.0, *kept["seconds"][1:]]},
        {"seconds": [float("nan"), *kept["seconds"][1:]]},
        {"seconds": [1.0, *kept["seconds"][1:]]},  # width 8 at less than half of width 1
        {"widths": kept["widths"][::-1]},
        {"row": -1.0},
        {"version": 1},
        {"at": time.time() - 100 * 86_400},
        {"at": time.time() + 86_400},
    ]
    for damage in ("", "[1]", *(json.dumps({**kept, **change}) for change in wrong)):
        path.write_text(damage)
        forwards = model.forwards
        assert costs.of(model).seconds == pytest.approx(first.seconds, rel=1e-6)
        assert model.forwards > forwards, damage[:80]
        assert costs._read(path) is not None


def test_a_cost_of_a_busy_moment_is_measured_again_and_only_becomes_less(model: Clocked) -> None:
    model.noise = 1.0
    found = [costs.of(model)]
    assert not found[0].steady, "else nothing is shown"
    while not found[-1].steady and len(found) < 30:
        found.append(costs.of(model))
    assert found[-1].steady
    for before, after in itertools.pairwise(found):
        assert all(after.width(n) <= before.width(n) * (1 + 1e-9) for n in before.widths)
    assert found[-1].width(8) / found[-1].width(1) == pytest.approx(TRUTH.width(8) / TRUTH.width(1), rel=0.25)
    forwards = model.forwards
    assert costs.of(model) == found[-1]
    assert model.forwards == forwards


def test_the_key_covers_what_a_cost_depends_on(model: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {costs._path(model)}
    for change in (
        "threads",
        "isa",
        "dtype",
        "device",
        "weight_bytes",
        "kv_bytes_per_position",
        "max_length",
        "layers",
    ):
        other = Clocked()
        if change in ("threads", "isa"):
            setattr(other, change, "3")
        else:
            object.__setattr__(other.info, change, 77)
        paths.add(costs._path(other))
    monkeypatch.setattr("outpace.models.host.kind", lambda: ("another one", frozenset()))
    paths.add(costs._path(model))
    monkeypatch.setattr("outpace.common.version.__version__", "0.0.0")
    paths.add(costs._path(model))
    assert len(paths) == 11


def test_too_little_memory_for_a_row_gives_a_guess(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    for limit in (20, 60):
        model = clocked(monkeypatch, limit=limit)
        guess = costs.of(model)
        assert guess.ratio(8) > 1
        assert guess.doubts() is None
        assert "not measured" in caplog.text
        assert model.kv.rows == []
    assert not (cache / "costs").exists()
    tight = clocked(monkeypatch, limit=150)  # one short row, no more
    assert costs.of(tight).position == 0.0
    assert tight.kv.rows == []


def test_a_clock_that_makes_no_sense_gives_a_guess(model: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.time, "perf_counter", lambda: 1.0)
    assert costs.of(model) == Cost.guess()
    assert model.kv.rows == []


def test_a_cost_that_is_known_outlives_a_clock_that_makes_no_sense(
    model: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.noise = 1.0
    known = costs.of(model)
    assert not known.steady, "else nothing is measured again"
    monkeypatch.setattr(costs.time, "perf_counter", lambda: 1.0)
    assert costs.of(model).seconds == pytest.approx(known.seconds)


def test_beyond_the_table_the_last_slope_goes_on() -> None:
    cost = Cost((1, 2, 4), (1.0, 1.5, 3.5))
    assert [cost.width(n) for n in (0, 1, 2, 3, 4, 5, 9)] == pytest.approx([0, 1, 1.5, 2.5, 3.5, 4.5, 8.5])
    assert cost.forward([2, 2], [0, 0]) == cost.width(4)


def test_doctor_gets_the_table_and_what_was_learnt() -> None:
    policy = Driven(TRUTH)
    assert report(TRUTH, policy)["learnt"] is None
    assert report(TRUTH)["cost"] == TRUTH.to_dict()
    run(policy, Machine(TRUTH), [text(0)], steps=50)
    (curve,) = report(TRUTH, policy)["learnt"]["curves"]
    assert curve["rows"] == 1
    assert curve["plain"] > 0
    assert curve["more"][0][0] == 1


def test_a_replaced_cost_remembers_nothing() -> None:
    cost = Cost((1, 8), (1.0, 2.0))
    assert cost.width(8) == 2.0
    assert replace(cost, seconds=(2.0, 4.0)).width(8) == 4.0
