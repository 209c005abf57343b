"""Theory: closed forms against sums and simulation, and what a bench file says."""

from __future__ import annotations

import pytest

from outpace.errors import ParameterError
from outpace.measure.theory import StepCosts, break_even, from_bench, outlook, tokens_per_step


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 0.999, 1.0])
@pytest.mark.parametrize("size", [0, 1, 4, 15])
def test_tokens_per_step_is_the_sum_over_outcomes(alpha: float, size: int) -> None:
    assert tokens_per_step(alpha, size) == pytest.approx(sum(alpha**i for i in range(size + 1)))


def test_the_issue_s_example() -> None:
    found = outlook(0.7, 4, StepCosts(0.1, 1.2, 4))
    assert found.tokens_per_step == pytest.approx(2.7731)
    assert found.speedup == pytest.approx(2.7731 / 1.6)
    every = [tokens_per_step(0.7, k) / (1 + 0.05 * k + 0.1 * k) for k in range(64)]
    assert found.best_size == every.index(max(every)) == 3
    assert found.break_even is not None
    assert tokens_per_step(found.break_even, 4) == pytest.approx(1.6)


def test_what_never_pays_says_so() -> None:
    found = outlook(0.5, 4, StepCosts(2.0, 1.0, 4))
    assert (found.best_size, found.best_speedup, found.break_even) == (0, 1.0, None)
    assert break_even(0, StepCosts(0.0, 1.0, 1)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1.5, 4, StepCosts(0, 1, 4)), "alpha 1.5"),
        ((0.5, 99, StepCosts(0, 1, 4)), "size 99"),
        ((0.5, 4, StepCosts(-1, 1, 4)), "draft cost -1"),
    ],
)
def test_nonsense_is_refused_by_name(given: tuple[float, int, StepCosts], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        outlook(*given)


def bench_file() -> dict:
    def stats(steps: int, tokens: int, drafted_at: list[int], accepted_at: list[int], seconds: float) -> dict:
        phases = {"draft": 0.1 * (seconds > 20), "target": seconds - 0.1 * (seconds > 20), "verify": 0.0, "other": 0.0}
        return {
            "steps": steps, "tokens": tokens, "drafted": sum(drafted_at), "drafted_at": drafted_at,
            "accepted_at": accepted_at, "seconds": phases,
        }  # fmt: skip

    runs = [
        {"config": "none", "stats": stats(20, 20, [], [], 20.0)},
        {"config": "ngram", "stats": stats(20, 32, [10, 10], [8, 4], 25.1)},
    ]
    return {"configs": [{"name": "none"}, {"name": "ngram", "speedup": {"ratio": 1.3}}], "runs": runs}


def test_measured_acceptance_and_cost_come_from_a_bench_file() -> None:
    (found,) = from_bench(bench_file())
    assert found.alpha == pytest.approx(12 / 18)  # 10 + 8 tokens were tried, 8 + 4 of them accepted
    assert (found.covered, found.size) == (0.5, 2.0)
    assert found.costs.draft == pytest.approx(0.005)
    assert found.costs.width == pytest.approx(1.5)  # half of the steps took 0.5 more
    assert found.speedup == 1.3  # bench's own figure


@pytest.mark.parametrize("value", [{}, [], {"configs": []}, {**bench_file(), "runs": []}])
def test_what_is_no_bench_file_is_refused(value: dict) -> None:
    with pytest.raises(ParameterError, match="bench"):
        from_bench(value)
