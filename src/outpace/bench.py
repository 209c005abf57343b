"""Drafters side by side on the same prompts, in turn (A B A B): speeds, acceptance, and whether the tokens agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.compare import Difference, compare
from outpace.engine import Engine
from outpace.prompts import PromptRow
from outpace.statistics import Stats, pooled
from outpace.types import I32, Result, SamplingParams

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode: an engine over the shared target, and the spec its drafter came from."""

    name: str
    engine: Engine


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
        """Every prompt under every configuration in turn; ``done(n)`` is called when n more prompts are through."""
        for start in range(0, len(prompts), concurrency):
            group = list(prompts[start : start + concurrency])
            turns = max(len(p.turns) for p in group) if self.all_turns else 1
            histories: dict[str, list[list[dict[str, str]]]] = {
                c.name: [[] for _ in group] for c in self.configurations
            }
            for turn in range(turns):
                asked = [i for i, p in enumerate(group) if turn < len(p.turns)]
                self._turn(group, turn, asked, histories)
            done(len(group))

    def _turn(
        self, group: list[PromptRow], turn: int, asked: list[int], histories: dict[str, list[list[dict[str, str]]]]
    ) -> None:
        baseline: list[Result] = []
        prompts: list[I32] = []
        finished: list[Run] = []
        for configuration in self.configurations:
            engine, own = configuration.engine, histories[configuration.name]
            for i in asked:
                own[i].append({"role": "user", "content": group[i].turns[turn]})
            # Later turns continue the first configuration's conversation, so that all answer the same prompt.
            shared = histories[self.configurations[0].name]
            prompts = prompts or [encode_turn(engine, shared[i]) for i in asked]
            begun = time.perf_counter()
            results = engine.generate_many([p.tolist() for p in prompts], self.params)
            seconds = (time.perf_counter() - begun) / len(asked)
            baseline = baseline or results
            for i, prompt, first, result in zip(asked, prompts, baseline, results, strict=True):
                difference = compare(engine, prompt, self.params, first, result)
                finished.append(Run(group[i], turn, configuration.name, result, seconds, difference))
        for i, first in zip(asked, baseline, strict=True):
            for history in histories.values():
                history[i].append({"role": "assistant", "content": first.text})
        self.runs += finished  # all or none, so that an interruption leaves whole comparisons

    def report(self) -> list[dict[str, Any]]:
        """One entry a configuration, with ``by_category`` of the same fields."""
        out = []
        for configuration in self.configurations:
            categories = dict.fromkeys(run.prompt.category for run in self.runs)
            entry = {
                "name": configuration.name,
                "drafter": configuration.engine.drafter.name,
                "size": configuration.engine.size if configuration.engine.drafter.name != "none" else 0,
                "acceptance": configuration.engine.acceptance,
                **self._figures(configuration.name, None),
            }
            entry["by_category"] = {name: self._figures(configuration.name, name) for name in categories}
            out.append(entry)
        return out

    def _figures(self, name: str, category: str | None) -> dict[str, Any]:
        chosen = [run for run in self.runs if category is None or run.prompt.category == category]
        mine = [run for run in chosen if run.configuration == name]
        first = [run for run in chosen if run.configuration == self.configurations[0].name]
        stats: Stats = pooled(run.result.stats for run in mine)
        seconds = sum(run.seconds for run in mine)
        return {
            "prompts": len(mine),
            "identical": sum(run.difference is None for run in mine),
            "near_ties": sum(run.difference is not None and run.difference.near_tie for run in mine),
            "tokens": stats.tokens,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
            "end_to_end_tokens_per_second": stats.tokens / seconds if seconds else 0.0,
            "tokens_per_step": stats.tokens_per_step,
            "acceptance_rate": stats.acceptance_rate,
            "speedup": speedup(
                [run.result.stats.decode_tokens_per_second for run in first],
                [run.result.stats.decode_tokens_per_second for run in mine],
            ),
        }


def speedup(before: Sequence[float], after: Sequence[float]) -> dict[str, float | None]:
    """Median of the paired ratios after / before, and its 95 % interval (bootstrap over prompts, fixed seed)."""
    ratios = np.array([a / b for a, b in zip(after, before, strict=True) if a > 0 and b > 0])
    if not len(ratios):
        return {"median": None, "low": None, "high": None}
    picks = np.random.default_rng(0).integers(0, len(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return {"median": float(np.median(ratios)), "low": float(low), "high": float(high)}


def encode_turn(engine: Engine, messages: list[dict[str, str]]) -> I32:
    """A conversation as token ids; without a chat template, its texts one after the other."""
    if engine.tokenizer is not None and not engine.tokenizer.has_chat_template:
        return engine.encode("\n\n".join(message["content"] for message in messages), raw=True)
    return engine.encode(messages)
