"""The policy and mixtures of experts: a check's price is that of the experts it reads."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np
import pytest

from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, RowView
from tests.simulated import CPU, Driven, Machine, Outcome, Text, run, steady, text, view

EXPERTS, USED = 64, 8
WIDTHS = (1, 2, 4, 8, 16, 32)


@functools.cache
def read(tokens: int, alike: float = 1.0) -> float:
    """Experts that tokens read which choose like so many independent ones, by counting what is drawn."""
    rng = np.random.default_rng(tokens)
    first, found = rng.permuted(np.tile(np.arange(EXPERTS), (400, 1)), axis=1)[:, :USED], np.zeros((400, EXPERTS), bool)
    np.put_along_axis(found, first, True, 1)
    for _ in range(tokens - 1):
        chosen = rng.permuted(np.tile(np.arange(EXPERTS), (400, 1)), axis=1)[:, :USED]
        own = rng.random(400) < alike
        found[own[:, None] & (np.arange(EXPERTS) == chosen[..., None]).any(1)] = True
    return float(found.sum(1).mean())


@dataclass
class Mixture(Machine):
    """A plain step of 10 ms, of which experts take 6.4; its tokens choose alike."""

    alike: float = 1.0

    def __post_init__(self) -> None:
        self._read = {tokens: read(tokens, self.alike) for tokens in range(1, 20)}

    def experts(self, tokens: int, step: int) -> float:
        drawn = np.random.default_rng([tokens, step]).normal(0.0, 0.05)
        return self._read[min(tokens, 19)] if tokens == 1 else self._read[min(tokens, 19)] * (1 + drawn)

    def body(self, rows: int, nodes: int, context: float, step: int, prefill: int = 0) -> float:
        return 3.6e-3 + 1e-4 * (rows + nodes) + 0.8e-3 * self.experts(rows + nodes, step)


def table(machine: Mixture, experts: bool = True) -> Cost:
    """As measured with tokens that have nothing in common."""
    count = tuple(read(width) for width in WIDTHS)
    seconds = tuple(3.6e-3 + 1e-4 * width + 0.8e-3 * each for width, each in zip(WIDTHS, count, strict=True))
    known = {"experts": EXPERTS, "used": USED, "expert": 0.8e-3, "read": count}
    return Cost(WIDTHS, seconds, **(known if experts else {}))


@pytest.mark.parametrize("alike", [0.3, 0.6, 1.0])
def test_it_learns_how_many_experts_drafts_share_and_is_never_slower(alike: float) -> None:
    machine = Mixture(CPU, alike=alike)
    policy = Driven(table(machine), explain=True)
    found = run(policy, machine, [text(0), text(1)])
    (curve,) = policy.learnt().curves
    measured = {nodes: more for nodes, more, ratios in curve.more if ratios >= 12}
    for nodes, more in measured.items():
        true = np.mean([machine.body(1, nodes, 0, step) for step in range(200)]) / machine.body(1, 0, 0, 0) - 1
        assert more == pytest.approx(true, rel=0.12, abs=0.03), (alike, nodes)
    told = [re.search(r"check of (\d+) tokens reads (\d+)", decision.why) for (decision,) in found.decisions[-200:]]
    counts = [(int(match[1]), int(match[2])) for match in told if match]
    assert counts
    for tokens, experts in counts:
        assert experts == pytest.approx(read(tokens, alike), rel=0.12)
    assert found.speedup > (1.0 if alike < 1 else 0.98), "independent tokens read so much that hardly a draft pays"
    assert run(Driven(table(machine)), machine, [steady(2, 0.0, 600, said=0.9)]).speedup > 0.98


def test_what_a_step_read_is_taken_out_of_what_it_took() -> None:
    """Steps whose numbers of experts vary say as much of the machine as steps whose numbers do not."""
    spread = []
    for known in (True, False):
        machine = Mixture(CPU, noise=0.0, alike=0.6)
        policy = Driven(table(machine, known))
        run(policy, machine, [steady(3, 0.8, 400)])
        (curve,) = policy.learnt().curves
        true = {n: machine.body(1, n, 0, 0) / machine.body(1, 0, 0, 0) - 1 for n, _, _ in curve.more}
        spread.append(np.mean([abs(more - true[n]) / true[n] for n, more, ratios in curve.more if ratios >= 4]))
    assert spread[0] <= spread[1] + 0.02


def each_reason() -> dict[str, list[str]]:
    """What decisions said in runs that bring up all reasons: their words, and those with figures."""
    machine, explained = Mixture(CPU), {"explain": True}

    def network(row: int, request: int) -> RowView:
        return view(row, request, cost=DraftCost(levels="a"))

    def fixed(row: int, request: int) -> RowView:
        return view(row, request, adaptive=False)

    unfair = [steady(i, 0.0 if i else 0.95, 400) for i in range(4)]
    outcomes: list[Outcome] = [
        run(Driven(CPU, **explained), Machine(CPU), [text(0)], steps=300),
        run(Driven(table(machine), **explained), machine, [text(0)], steps=300),
        run(Driven(CPU, **explained), Machine(CPU), [steady(0, 0.0, said=0.9)]),
        run(Driven(CPU, **explained), Machine(CPU, ask=0.003), unfair, rows=4),
        run(Driven(CPU, stretch=1.12, **explained), Machine(CPU, ask=0.05), [steady(i, 0.95) for i in (0, 1)], rows=2),
        run(Driven(CPU, **explained), Machine(CPU, ask=0.2), [steady(0, 0.02)]),
        run(Driven(CPU, **explained), Machine(CPU, level=0.4), [steady(0, 0.1)], views=network),
        run(Driven(CPU, **explained), Machine(CPU), [Text([2], [1], [0.5], [0.5])], views=fixed),
    ]
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for decision in (each for step in outcome.decisions for each in step):
            found.setdefault(decision.why.split(":")[0], []).append(decision.why)
    return found


def test_every_reason_has_the_two_numbers_that_decide() -> None:
    reasons = each_reason()
    assert len(reasons) >= 11, sorted(reasons)
    for words, told in reasons.items():
        for why in told:
            figures = why.removeprefix(words).partition(";")[0]
            assert len(re.findall(r"-?\d+(?:\.\d+)?", figures)) == 2, why

    def two(words: str) -> list[tuple[float, float]]:
        (head,) = (each for each in reasons if words in each)
        return [tuple(map(float, re.findall(r"-?\d+\.\d+", why.partition(";")[0]))) for why in reasons[head]]  # type: ignore[misc]

    slack = 0.011  # of two rounded numbers
    assert all(takes >= may - slack for takes, may in two("would slow down"))
    assert all(takes >= may - slack for takes, may in two("the budget"))
    assert all(takes >= may - slack for takes, may in two("longer than it may"))
    assert all(brings >= takes - slack for brings, takes in two("are verified"))
    assert any("reads 15 of 64 experts" in why for told in reasons.values() for why in told)
