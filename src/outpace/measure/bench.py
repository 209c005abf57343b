"""Drafters side by side on the same prompts, in turn (A B A B): speeds, acceptance, and whether the tokens agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.common.arrays import I32
from outpace.engine.engine import Engine
from outpace.engine.results import Result
from outpace.engine.statistics import Stats, pooled
from outpace.measure.compare import Difference, compare
from outpace.measure.prompts import PromptRow, encode_turns
from outpace.params import SamplingParams

_RESAMPLES = 2000
_WARM_UP = 8  # tokens


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode: an engine over the shared target, and the spec its drafter came from.

    ``plain``: without drafts, whatever the engine's drafter is.
    """

    name: str
    engine: Engine
    plain: bool = False

    def generate(self, prompts: Sequence[I32], params: SamplingParams) -> list[Result]:
        """The answers to ``prompts`` int32 [P] each, run together."""
        options: dict[str, Any] = {"drafter": False} if self.plain else {}
        return self.engine.generate_many([prompt.tolist() for prompt in prompts], params, **options)


@dataclass(slots=True)
class Run:
    """One prompt under one configuration. ``seconds``: wall time of the group it ran in, divided among its requests."""

    prompt: PromptRow
    turn: int
    configuration: str
    result: Result
    seconds: float
    difference: Difference | None  # against the first configuration

    def to_dict(self) -> dict[str, Any]:
        stats = self.result.stats
        return {
            "id": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "config": self.configuration,
            "identical": self.difference is None,
            "difference": None if self.difference is None else self.difference.to_dict(),
            "tokens": stats.tokens,
            "prompt_tokens": stats.prompt_tokens,
            "finish_reason": self.result.finish_reason,
            "seconds": self.seconds,
            "stats": stats.to_dict(),
        }


@dataclass(slots=True)
class Bench:
    """Runs the prompts and keeps what it has, so that an interrupted run still reports."""

    configurations: Sequence[Configuration]
    params: SamplingParams
    all_turns: bool = False
    runs: list[Run] = field(default_factory=list)

    def run(self, prompts: Sequence[PromptRow], concurrency: int, done: Callable[[int], None]) -> None:
        """Every prompt under every configuration in turn; ``done(n)`` is called when n more prompts are through.

        Raises ParameterError that names a prompt which does not fit, before anything has run.
        """
        engine = self.configurations[0].engine
        encoded = [encode_turns(engine, prompt) for prompt in prompts]
        for configuration in self.configurations:  # first touches are not speed
            configuration.generate(encoded[:1], self.params.with_(min_tokens=0, max_tokens=_WARM_UP))
        for start in range(0, len(prompts), concurrency):
            group = prompts[start : start + concurrency]
            self._group(group)
            done(len(group))

    def _group(self, group: Sequence[PromptRow]) -> None:
        histories: list[list[Mapping[str, str]]] = [list(p.messages[:-1]) for p in group]
        for turn in range(max(len(p.turns) for p in group) if self.all_turns else 1):
            asked = [i for i, p in enumerate(group) if turn < len(p.turns)]
            rows = [group[i] for i in asked]
            for i in asked:
                histories[i].append({"role": "user", "content": group[i].turns[turn]})
            prompts = [encode_turns(self.configurations[0].engine, group[i], histories[i]) for i in asked]
            baseline = self._turn(rows, turn, prompts)
            # Later turns continue the first configuration's conversation, so that all answer the same prompt.
            for i, first in zip(asked, baseline, strict=True):
                histories[i].append({"role": "assistant", "content": first.text})

    def _turn(self, rows: Sequence[PromptRow], turn: int, prompts: Sequence[I32]) -> list[Result]:
        """One turn of some conversations under every configuration; the first one's results."""
        finished: list[Run] = []
        baseline: list[Result] = []
        for configuration in self.configurations:
            begun = time.perf_counter()
            results = configuration.generate(prompts, self.params)
            seconds = (time.perf_counter() - begun) / len(rows)
            baseline = baseline or results
            for row, prompt, first, result in zip(rows, prompts, baseline, results, strict=True):
                difference = compare(configuration.engine, prompt, self.params, first, result)
                finished.append(Run(row, turn, configuration.name, result, seconds, difference))
        self.runs += finished  # all or none, so that an interruption leaves whole comparisons
        return baseline

    def report(self) -> list[dict[str, Any]]:
        """One entry a configuration, with ``by_category`` of the same fields."""
        out = []
        for configuration in self.configurations:
            categories = dict.fromkeys(run.prompt.category for run in self.runs)
            engine = configuration.engine
            drafts = engine.drafter.name != "none" and not configuration.plain
            entry = {
                "name": configuration.name,
                "drafter": engine.drafter.name,
                "size": engine.options.size if drafts else 0,
                "acceptance": engine.options.acceptance,
                **self._figures(configuration.name, None),
            }
            entry["by_category"] = {name: self._figures(configuration.name, name) for name in categories}
            out.append(entry)
        return out

    def _figures(self, name: str, category: str | None) -> dict[str, Any]:
        chosen = [run for run in self.runs if category is None or run.prompt.category == category]
        own = [run for run in chosen if run.configuration == name]
        first = [run for run in chosen if run.configuration == self.configurations[0].name]
        stats: Stats = pooled(run.result.stats for run in own)
        seconds = sum(run.seconds for run in own)
        return {
            "prompts": len(own),
            "identical": sum(run.difference is None for run in own),
            "near_ties": sum(run.difference is not None and run.difference.near_tie for run in own),
            "tokens": stats.tokens,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
            "end_to_end_tokens_per_second": stats.tokens / seconds if seconds else 0.0,
            "tokens_per_step": stats.tokens_per_step,
            "acceptance_rate": stats.acceptance_rate,
            "speedup": speedup(
                [run.result.stats.decode_tokens_per_second for run in first],
                [run.result.stats.decode_tokens_per_second for run in own],
            ),
        }


def speedup(before: Sequence[float], after: Sequence[float]) -> dict[str, float | None]:
    """Median of the paired ratios after / before, and its 95 % interval (bootstrap over prompts, fixed seed).

    A pair in which either has no speed (an answer of one delta) says nothing and is left out; None when none is left.
    """
    ratios = np.array([a / b for a, b in zip(after, before, strict=True) if a > 0 and b > 0])
    if not len(ratios):
        return {"median": None, "low": None, "high": None}
    picks = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}
