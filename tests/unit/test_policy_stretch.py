"""``step_stretch``: no step that drafts for several rows takes longer than it may, whatever is drafted, and one row
alone is not held to it. On simulated machines, by true means (tests/simulated.py)."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, RowView
from outpace.engine.engine import Engine
from outpace.engine.intake import EngineOptions
from outpace.engine.request import StepRecord
from outpace.errors import ParameterError
from outpace.params import SamplingParams
from tests.simulated import (
    CPU,
    TWO_CORES,
    WRONG,
    Driven,
    Machine,
    Outcome,
    chains,
    run,
    steady,
    verdicts,
    view,
)
from tests.toy import ToyModel
from tests.tracing import VOCAB, Branches

FLAT = Cost((1, 64), (1.0, 4.0))
KINDS = [DraftCost(), DraftCost(levels="deep"), DraftCost(levels="deep", nodes=True), DraftCost(trims=False)]


def kinds(*which: int) -> Any:
    def views(row: int, request: int) -> RowView:
        kind = which[request % len(which)]
        return view(row, request, cost=KINDS[kind], drafter=f"d{kind}")

    return views


def crowd(policy: Driven, machine: Machine, rows: int, *which: int, steps: int = 120) -> Outcome:
    texts = [steady(seed, 0.9, 2000) for seed in range(rows)]
    return run(policy, machine, texts, rows=rows, steps=steps, views=kinds(*which))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("rows", [2, 8])
def test_no_step_of_several_rows_is_longer_than_it_may_be(rows: int, which: tuple[int, ...]) -> None:
    machine, stretch = Machine(FLAT, ask=0.003, level=0.05), 1.25
    free, held = (crowd(Driven(FLAT, stretch=its), machine, rows, *which) for its in (None, stretch))
    assert max(free.stretches) > stretch, "else nothing is shown"
    assert max(held.stretches) <= 1.05 * stretch
    assert held.speedup > 0.98


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_table_is_found_out(wrong: str) -> None:
    policy, machine = Driven(WRONG[wrong](CPU), stretch=1.5), Machine(CPU, ask=0.003)
    found = crowd(policy, machine, 4, 0, steps=300)
    assert sum(its > 1.05 * 1.5 for its in found.stretches) <= 6
    assert max(found.stretches[100:]) <= 1.1 * 1.5


def test_rows_that_gain_still_draft() -> None:
    for rows, least in ((2, 2.0), (4, 1.4), (8, 1.05)):
        assert crowd(Driven(CPU, stretch=2.0), Machine(CPU, ask=0.003), rows, 0, steps=400).speedup > least


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_row_alone_is_not_held_to_it(which: int) -> None:
    machine = Machine(CPU, ask=0.003, level=0.05)
    free, held = (crowd(Driven(CPU, stretch=its), machine, 1, which) for its in (None, 1.0))
    assert free.widths == held.widths
    assert max(free.widths) > 3


@pytest.mark.parametrize("rows", [1, 4])
def test_what_prompts_take_is_not_there_for_drafts(rows: int) -> None:
    """Long chunks leave nothing, and short ones what they do not take."""
    policy = Driven(TWO_CORES, stretch=2.0)
    views = [view(row) for row in range(rows)]

    def planned(prefill: int) -> tuple[list[int], str]:
        nodes = policy.plan(views, [15] * rows, [300] * rows, prefill).nodes
        kept, decisions = policy.trim(chains([min(n, 4) for n in nodes], [0.95] * rows))
        seconds = TWO_CORES.forward([1 + n for n in kept.widths.tolist()], [300] * rows)
        seconds += TWO_CORES.width(64) / 64 * prefill
        policy.learn(verdicts(kept.widths.tolist()), 0, seconds)
        return nodes, decisions[0].why

    for _ in range(40):
        planned(0)
        nodes, why = planned(64)
        assert nodes == [0] * rows
        assert why == "the step would take longer than it may beside others"
    assert max(planned(2)[0]) > 0
    assert Driven(TWO_CORES).plan(views, [15] * rows, [300] * rows, 64).nodes == [15] * rows


def test_an_engine_tells_its_policy() -> None:
    drafted: dict[float | None, dict[int, int]] = {}
    why: dict[float | None, set[str]] = {}  # of two rows
    for stretch in (None, 1):
        nodes = drafted[stretch] = {1: 0, 2: 0}  # by rows

        def count(step: StepRecord, nodes: dict[int, int] = nodes, stretch: float | None = stretch) -> None:
            if step.rows:
                nodes[len(step.rows)] += sum(len(row.kept) for row in step.rows)
            if len(step.rows) == 2:
                why.setdefault(stretch, set()).update(row.why.split(":")[0] for row in step.rows)

        model = ToyModel(VOCAB)
        flat = Cost((1, 64), (1.0, 1.0 + 1e-6))
        with Engine(model, drafter=Branches(model), cost=flat, step_stretch=stretch, on_step=count) as engine:
            for tokens in (20, 40):
                engine.add([1, 2, 3], SamplingParams(max_tokens=tokens, temperature=0))
            while not engine.idle:
                engine.step()
    assert drafted[None][2] > 0
    assert drafted[1][2] == 0
    assert drafted[1][1] > 0
    assert "the step would take longer than it may beside others" in why[1] - why[None]


def test_nonsense_is_refused() -> None:
    wrongs: list[Any] = [0.99, float("nan"), True, "2"]
    for wrong in wrongs:
        with pytest.raises(ParameterError, match="step_stretch"):
            EngineOptions(step_stretch=wrong)
    with pytest.raises(ValueError, match="shorter than a plain one"):
        Driven(CPU, stretch=0.5)
    assert EngineOptions(step_stretch=1).step_stretch == 1
