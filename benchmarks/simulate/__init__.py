"""Replicas by the hundred, simulated: the real router's choices, with step times measured on this machine.

    python -m benchmarks simulate --measure docs/results/steps.json       # a minute, nothing else running
    python -m benchmarks simulate --plot docs/images/replicas.svg
    python -m benchmarks simulate --real 20                               # two real servers behind the same routers

Conversations with shared system prompts come at a rate that would load the replicas by ``--load`` if every prompt were
computed whole; the same ones for each way to choose a replica. Then a share of the replicas dies at once, and their
requests go on elsewhere. All but the times of choices depends on ``--seed`` alone.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Measuring, add_json, emit
from benchmarks.simulate.real import measured
from benchmarks.simulate.replicas import Conversation, Outcome, Router, Simulation, Turn
from benchmarks.simulate.steps import Steps, measure, read
from outpace.cli.terminal import table
from outpace.errors import Argument, ParameterError
from outpace.integrations.ray.routing import Routes
from outpace.measure import plot

SYSTEM, QUESTION, ANSWER, TURNS = 512, 48, 96, 3  # means: tokens, tokens, tokens, turns
PAUSE = 15.0  # seconds, mean, before the next turn
MOST_TURNS = 8
HEALTH = 2.0  # seconds between Ray's looks at a replica


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, begins: Sequence[str], load: Mapping[str, int], avoid: Any = ()) -> str | None:
        self._next += 1
        return list(load)[self._next % len(load)] if load else None


class Least:
    """The one with the fewest requests in flight."""

    def choose(self, begins: Sequence[str], load: Mapping[str, int], avoid: Any = ()) -> str | None:
        return min(load, key=lambda name: load[name], default=None)


ROUTERS: dict[str, Callable[[], Router]] = {"prefixes": Routes, "least load": Least, "round robin": RoundRobin}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=Path, default=Path("docs/results/steps.json"), help="measured step times")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="measure step times into FILE, and end")
    parser.add_argument("--real", type=float, metavar="SECONDS", help="ask real servers, so long each, and end")
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=60.0, help="in which conversations begin")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--systems", type=int, default=200, help="system prompts; the k-th is asked 1/k as often")
    parser.add_argument("--dies", type=float, default=0.2, help="share of the replicas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .svg or .png")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Raises ParameterError for options with which nothing can be simulated."""
    check(given)
    if given.measure is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(measure(given.measure, Path(folder) / "log"))
        return 0
    if given.real is not None:
        return ask_real(given)
    if given.plot is not None:
        plot.check(given.plot)
    steps = read(given.steps)
    figures: list[dict[str, Any]] = []
    with Measuring() as measuring:
        for count in given.replicas:
            asked = conversations(steps, count, given)
            if not asked:
                raise ParameterError(Argument("seconds", given.seconds), " is too short for a conversation: give more")
            for name, router in ROUTERS.items():
                outcome = Simulation(steps, router(), count, clock=time.process_time).run(asked)
                figures.append(summary(outcome, name, count, given.seconds))
            if given.dies:
                figures.append(summary(losing(steps, asked, count, given), "prefixes", count, given.seconds))
    print(table(HEADS, [line(row) for row in figures]))
    emit(given, {"figures": figures})
    if given.plot is not None and figures:
        draw(given.plot, figures)
    return measuring.end(0)


def check(given: argparse.Namespace) -> None:
    for name in ("seconds", "load", "systems", "real"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise ParameterError(Argument(name, value), " is out of range: give a number above 0")
    if min(given.replicas) < 1:
        raise ParameterError(Argument("replicas", min(given.replicas)), " is out of range: give at least 1")
    if not 0 <= given.dies < 1:
        raise ParameterError(Argument("dies", given.dies), " is out of range: give a share from 0 to below 1")


def ask_real(given: argparse.Namespace) -> int:
    """Two servers behind each router, and one alone, in turn and twice. Raises OSError."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Measuring() as measuring:
        for name, count in [("prefixes", 2), ("round robin", 2), ("prefixes", 1)] * 2:
            found = measured(ROUTERS[name](), count, given.real, Path(folder) / "log")
            figures.append({"router": name, "servers": count, **found})
            print(f"{name}, {count} servers: found {found['hits']:.3f} of prompts, {found['tokens']:.0f} tokens/s")
    emit(given, {"real": figures})
    return measuring.end(0)


def losing(steps: Steps, asked: Sequence[Conversation], count: int, given: argparse.Namespace) -> Outcome:
    """A share of the replicas dies when half of the conversations have begun."""
    dead, at = max(1, round(given.dies * count)), given.seconds / 2
    picks = np.random.default_rng(given.seed).integers(0, count, dead).tolist()
    simulation = Simulation(steps, Routes(), count, restart=HEALTH + steps.start, clock=time.process_time)
    return simulation.run(asked, [(at, pick) for pick in picks])


def conversations(steps: Steps, count: int, given: argparse.Namespace) -> list[Conversation]:
    rng = np.random.default_rng(given.seed)
    whole = SYSTEM + QUESTION + (TURNS - 1) / 2 * (QUESTION + ANSWER)
    seconds = whole * steps.prefill + ANSWER * steps.decode[-1] / steps.rows[-1]  # of a replica, for a request
    rate = given.load * count / seconds / TURNS
    systems = [_text(rng, int(rng.integers(SYSTEM // 2, SYSTEM * 3 // 2))) for _ in range(given.systems)]
    shares = 1 / np.arange(1, given.systems + 1)
    chosen = rng.choice(given.systems, int(rate * given.seconds), p=shares / shares.sum())
    begins = np.sort(rng.uniform(0, given.seconds, len(chosen)))
    return [
        Conversation(systems[system], _turns(rng, float(at))) for system, at in zip(chosen, begins, strict=True)
    ]  # fmt: skip


def _turns(rng: np.random.Generator, at: float) -> list[Turn]:
    count = min(int(rng.geometric(1 / TURNS)), MOST_TURNS)
    pauses = [at, *rng.exponential(PAUSE, count - 1).tolist()]
    return [
        Turn(pause, _text(rng, int(rng.integers(QUESTION // 2, QUESTION * 3 // 2))), _text(rng, _length(rng)))
        for pause in pauses
    ]


def _length(rng: np.random.Generator) -> int:
    return min(1 + int(rng.geometric(1 / ANSWER)), 4 * ANSWER)


def _text(rng: np.random.Generator, tokens: int) -> str:
    return rng.integers(97, 123, 4 * tokens).astype(np.uint8).tobytes().decode("ascii")


def summary(outcome: Outcome, router: str, count: int, seconds: float) -> dict[str, Any]:
    """Figures. ``hits``: share of prompt tokens whose KV was there; ``work``: of ``count`` replicas in the ``seconds``
    in which conversations begin; ``wait``, ``token``, ``gap``: seconds; ``choice``: seconds of this machine for one."""
    answered = outcome.answered
    waits = np.array([request.first - request.at for request in answered])
    per_token = np.array([(r.last - r.first) / (len(r.answer) - 1) for r in answered if len(r.answer) > 1])
    lost = [request for request in answered if request.lost]
    found = sum(request.found for request in answered)
    routed = np.array(list(outcome.routed.values()))
    return {
        "replicas": count, "router": router, "died": outcome.died, "requests": len(answered),
        "hits": found / (found + sum(request.computed for request in answered)),
        "wait_p50": float(np.percentile(waits, 50)), "wait_p99": float(np.percentile(waits, 99)),
        "token_p50": float(np.percentile(per_token, 50)), "token_p99": float(np.percentile(per_token, 99)),
        "work": outcome.busy / (count * seconds),
        "most_over_mean": float(routed.max() / routed.sum() * count),
        "resumed": len(lost), "gap_p50": float(np.median([r.gap for r in lost])) if lost else 0.0,
        "gap_most": max((r.gap for r in lost), default=0.0), "down": outcome.down / (count * seconds),
        "choice": outcome.choosing / outcome.choices,
    }  # fmt: skip


HEADS = (
    "replicas", "router", "died", "requests", "hits", "wait p50", "p99 (s)", "ms/token p50", "p99", "work",
    "most / mean", "resumed", "gap p50", "most (s)", "choice (us)",
)  # fmt: skip


def line(row: Mapping[str, Any]) -> list[str]:
    return [
        str(row["replicas"]), row["router"], str(row["died"]), str(row["requests"]), f"{row['hits']:.3f}",
        f"{row['wait_p50']:.3f}", f"{row['wait_p99']:.2f}", f"{1e3 * row['token_p50']:.1f}",
        f"{1e3 * row['token_p99']:.1f}", f"{row['work']:.2f}", f"{row['most_over_mean']:.2f}", str(row["resumed"]),
        f"{row['gap_p50']:.2f}", f"{row['gap_most']:.2f}", f"{1e6 * row['choice']:.0f}",
    ]  # fmt: skip


PANELS = (("hits", "prompt tokens found", 1.0), ("work", "work, of capacity", 1.0),
          ("wait_p99", "first token, p99, s", 1.0), ("choice", "a choice, us", 1e6))  # fmt: skip


def draw(path: Path, figures: Sequence[Mapping[str, Any]]) -> None:
    """What became of each count of replicas, by router. Raises OSError."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 3.2), layout="constrained")
    for axes, (name, label, unit) in zip(picture.subplots(1, len(PANELS)), PANELS, strict=True):
        for router in ROUTERS:
            rows = [row for row in figures if row["router"] == router and not row["died"]]
            axes.plot([row["replicas"] for row in rows], [unit * row[name] for row in rows], marker="o", label=router)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("replicas")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    plot.save(picture, path)
