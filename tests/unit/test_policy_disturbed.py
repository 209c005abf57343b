"""The policy on a machine that others use, too: stolen processor time, a process that is stopped, more busy processes
than cores, a server's mix of prompts. Speeds are of undisturbed time, so only decisions count."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from outpace.control.cost import Cost
from outpace.drafters.base import DraftCost, RowView
from tests.simulated import (
    CPU,
    TWO_CORES,
    Disturbed,
    Driven,
    Machine,
    best_fixed,
    loaded,
    run,
    slowed,
    steady,
    stolen,
    stopped,
    text,
    view,
)

SERVER = Cost((1, 2, 4, 8, 16, 32, 64), (4.2e-3, 4.3e-3, 5.8e-3, 8.1e-3, 13.3e-3, 26e-3, 50e-3), 4.9e-4)

DISTURBED: dict[str, Callable[[int], Disturbed]] = {
    "every second step, short": lambda seed: stolen(seed, 0.5, 3),
    "every second step, long": lambda seed: stolen(seed, 0.5),
    "four steps of five": lambda seed: stolen(seed, 0.8, 3),
    "stopped neighbours": lambda seed: stopped(seed, 40),
    "load": lambda seed: slowed(1 + np.exp(np.random.default_rng(seed).normal(0.5, 0.6, 20_000))),
    "load by running time": loaded,
    "in bursts": lambda seed: loaded(seed, 0.25),
}


@pytest.mark.parametrize("how", DISTURBED)
def test_drafts_are_as_good_as_the_best_fixed_size_while_others_use_the_machine(how: str) -> None:
    ratios, tokens = [], []
    for seed in range(8):  # the same text, disturbed in eight ways
        machine = Machine(TWO_CORES, ask=0.01, disturbed=DISTURBED[how](seed))
        texts = [text(i) for i in range(6)]
        found = run(Driven(TWO_CORES), machine, texts, seed=seed)
        ratios.append(found.speedup / best_fixed(machine, texts))
        tokens.append(found.whole.tokens / found.whole.steps)
    assert fmean(ratios) > 1, ratios
    assert min(ratios) > 0.95, ratios  # of 272 seeds 4 are below it, the worst at 0.87
    assert sorted(tokens)[-1] < 1.1 * sorted(tokens)[1], tokens  # one of eight may be unlucky


@pytest.mark.parametrize("how", DISTURBED)
def test_a_short_text_in_a_new_process_is_drafted_too(how: str) -> None:
    found = []
    for seed in range(8):
        machine = Machine(TWO_CORES, ask=0.01, disturbed=DISTURBED[how](seed))
        texts = [text(100 * seed, 250, high=0.9, low=0.5, share=0.7)]
        found.append(run(Driven(TWO_CORES), machine, texts, seed=seed).speedup / best_fixed(machine, texts))
    assert min(found) > 0.7, found
    assert fmean(found) > 0.88, found


@pytest.mark.parametrize("how", DISTURBED)
def test_where_nothing_is_accepted_a_slow_moment_costs_next_to_nothing(how: str) -> None:
    for seed in range(8):
        machine = Machine(TWO_CORES, ask=0.01, disturbed=DISTURBED[how](seed))
        found = run(Driven(TWO_CORES), machine, [steady(seed, 0.0, said=0.9)], seed=seed, steps=400)
        assert found.speedup > 0.98
        assert found.worst(100) > 0.97
        assert [d.size for (d,) in found.decisions[-200:]].count(0) > 150
        assert all("proposed nothing" not in d.why for (d,) in found.decisions), "it did propose"


@pytest.mark.parametrize("how", DISTURBED)
def test_a_network_pays_there(how: str) -> None:
    def views(row: int, request: int) -> RowView:
        return view(row, request, cost=DraftCost(levels="toy"))

    found = []
    for seed in range(6):
        machine = Machine(CPU, level=0.08, disturbed=DISTURBED[how](seed))
        texts = [text(10 * seed + i, 800, high=0.8, low=0.8, levels=True) for i in range(3)]
        found.append(run(Driven(CPU), machine, texts, views=views, seed=seed).speedup / best_fixed(machine, texts))
    assert min(found) > 0.75, found
    assert fmean(found) > 0.9, found


@pytest.mark.parametrize("how", [None, "every second step, long", "load", "in bursts"])
def test_a_servers_mix_of_prompts_is_not_slower(how: str | None) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"high": 0.35, "low": 0.2, "share": 0.5, "bias": 0.15},
        {"high": 0.9, "share": 0.7},
    )
    texts = [text(i, 120, **kinds[i % 3]) for i in range(32)]
    prompts = np.random.default_rng(0).integers(64, 513, 32).tolist()
    machine = Machine(SERVER, ask=0.006, disturbed=DISTURBED[how](0)) if how else Machine(SERVER, ask=0.006)
    found = run(Driven(SERVER), machine, texts, rows=8, prompt=prompts, chunk=64)
    assert found.speedup > 0.985
    assert min(request.speedup for request in found.requests) > 0.97


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
@pytest.mark.parametrize("how", [None, "stopped neighbours", "load", "load by running time"])
def test_no_four_seconds_are_slower(how: str | None, rows: int) -> None:
    """Chats of which half gain nothing, with prompts of all lengths in between."""
    machine = Machine(SERVER, ask=0.006, disturbed=DISTURBED[how](0)) if how else Machine(SERVER, ask=0.006)
    texts = [text(i, 120) if i % 2 else steady(i, 0.05, 120, said=0.5) for i in range(16 + 4 * rows)]
    prompts = np.random.default_rng(0).integers(16, 257, len(texts)).tolist()
    found = run(Driven(SERVER, stretch=2.0), machine, texts, rows=rows, prompt=prompts, chunk=64)
    assert found.worst(round(4 / machine.body(rows, 0, 300.0, 0))) > 0.98
