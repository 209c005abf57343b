"""Simulated replicas under the real router: nothing is lost, and one replica is the queue that theory knows."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import simulate
from benchmarks.__main__ import call
from benchmarks.simulate.replicas import Conversation, Outcome, Simulation, Turn
from benchmarks.simulate.steps import Steps, read
from outpace.integrations.ray.routing import Routes

STEPS = Steps((1, 16), (0.005, 0.02), 0.0005, 0.8)
HERE = Path(__file__).parents[2]


def asked(count: int, load: float = 0.9, seconds: float = 20.0, systems: int = 40) -> list[Conversation]:
    given = SimpleNamespace(seed=3, load=load, seconds=seconds, systems=systems)
    return simulate.conversations(STEPS, count, argparse.Namespace(**vars(given)))


def figures(outcome: Outcome) -> dict[str, Any]:
    return simulate.summary(outcome, "", 8, 20.0)


@pytest.mark.parametrize("deaths", [[], [(10.0, which) for which in (0, 5, 2)], [(5.0, 0)] * 8])
def test_every_request_is_answered_once_and_whole(deaths: list[tuple[float, int]]) -> None:
    """Also when replicas die, and when all do: prompts are computed or found whole, again where a replica was lost."""
    conversations = asked(8)
    outcome = Simulation(STEPS, Routes(), 8, restart=3.0).run(conversations, deaths)
    turns = {(id(request.conversation), request.turn) for request in outcome.answered}
    assert len(outcome.answered) == len(turns) == sum(len(each.turns) for each in conversations)
    assert all(request.delivered == len(request.answer) for request in outcome.answered)
    assert all(request.at < request.first <= request.last for request in outcome.answered)
    kept = [request for request in outcome.answered if not request.lost]
    assert all(request.found + request.computed == len(request.prompt) - 1 for request in kept)
    again = [request for request in outcome.answered if request.lost and request.gap]
    assert all(request.found + request.computed >= len(request.prompt) for request in again)
    assert bool(again) == bool(deaths)
    assert outcome.died == len(deaths)
    assert sum(outcome.routed.values()) == len(outcome.answered) + sum(request.lost for request in outcome.answered)


def test_the_seed_alone_decides() -> None:
    first, second = (figures(Simulation(STEPS, Routes(), 8).run(asked(8))) for _ in range(2))
    assert first == second


def test_prefixes_find_more_than_round_robin_and_wait_less() -> None:
    found = {
        name: figures(Simulation(STEPS, router(), 8).run(asked(8))) for name, router in simulate.ROUTERS.items()
    }  # fmt: skip
    assert found["prefixes"]["hits"] > 1.5 * found["round robin"]["hits"]
    assert found["prefixes"]["wait_p50"] < found["round robin"]["wait_p50"]
    assert found["prefixes"]["work"] < found["round robin"]["work"]
    assert found["round robin"]["most_over_mean"] < 1.05


def test_one_replica_with_one_row_is_the_queue_of_theory() -> None:
    """Poisson arrivals, one length: the mean wait of M/D/1 is rho / (2 (1 - rho)) services (Pollaczek, Khinchine)."""
    rng, load, service = np.random.default_rng(0), 0.7, 40 * 0.005
    at = np.cumsum(rng.exponential(service / load, 30_000))
    queue = [Conversation("", [Turn(float(each), "what", "word" * 40)]) for each in at]
    outcome = Simulation(STEPS, Routes(), 1, rows=1).run(queue)
    waits = [request.last - request.at - service for request in outcome.answered]
    assert np.mean(waits) / service == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert outcome.busy == pytest.approx(len(queue) * service)


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    steps = HERE / "docs/results/steps.json"
    sizes = ("--replicas", "2", "4", "--seconds", "4", "--steps", str(steps))
    assert call("simulate", [*sizes, "--json", str(out), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out.count("round robin") == 2
    assert picture.read_text().startswith("<?xml")
    assert call("simulate", ["--steps", str(out)]) == 2  # no measured steps
    assert "--measure writes them" in capsys.readouterr().err
    assert read(steps).step(0, 10) == pytest.approx(10 * read(steps).prefill)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--seconds", "0", "give a number above 0"),
        ("--load", "0", "give a number above 0"),
        ("--load", "inf", "give a number above 0"),
        ("--real", "-1", "give a number above 0"),
        ("--systems", "0", "give a number above 0"),
        ("--seconds", "0.001", "is too short for a conversation: give more"),
        ("--replicas", "0", "give at least 1"),
        ("--dies", "1", "give a share from 0 to below 1"),
        ("--dies", "-0.1", "give a share from 0 to below 1"),
    ],
)
def test_bad_options_are_refused(option: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ("--steps", str(HERE / "docs/results/steps.json"))
    assert call("simulate", [*steps, "--replicas", "2", option, value]) == 2
    said = capsys.readouterr().err
    assert f"{option[2:]}={value}" in said.replace(".0 ", " ")
    assert remedy in said


def test_where_none_dies_none_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    steps = ("--steps", str(HERE / "docs/results/steps.json"))
    assert call("simulate", [*steps, "--replicas", "2", "--seconds", "2", "--dies", "0"]) == 0
    assert capsys.readouterr().out.count("prefixes") == 1


def test_two_replicas_write_almost_twice_what_one_does() -> None:
    """All is asked at once, of 24 system prompts, with the step times that were measured."""
    steps, spent = read(HERE / "docs/results/steps.json"), []
    crowd = [Conversation(each.system, [replace(each.turns[0], pause=0.0)]) for each in asked(24, systems=24)]
    for count in (1, 2):
        answered = Simulation(steps, Routes(), count).run(crowd).answered
        spent.append(max(request.last for request in answered))
    assert spent[0] / spent[1] > 1.8
