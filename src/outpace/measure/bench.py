"""Drafters side by side on the same prompts, in turn (A B A B): speeds, acceptance, and whether the tokens agree.

A speedup is a configuration's decode tokens/s over the first one's, both pooled over all prompts. Its interval covers
the prompts; what the machine does meanwhile shows in the control, the first configuration once more on every prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outpace.common.arrays import F64, I32, repeated_tail
from outpace.engine.engine import Engine
from outpace.engine.results import Result
from outpace.engine.statistics import Stats, pooled
from outpace.exact.noise import Noise
from outpace.measure import machine
from outpace.measure.prompts import PromptRow, encode_turns
from outpace.measure.same import Difference, compare
from outpace.params import SamplingParams

CONTROL = "control"  # the name of its runs
_RESAMPLES = 2000
_WARM_UP = 8  # tokens


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to decode: an engine over the shared target, and what its requests ask for (``Engine.prepare``)."""

    name: str
    engine: Engine
    options: Mapping[str, Any] = field(default_factory=dict)

    def generate(self, prompts: Sequence[I32], params: SamplingParams) -> list[Result]:
        """The answers to ``prompts`` int32 [P] each, run together."""
        return self.engine.generate_many([prompt.tolist() for prompt in prompts], params, **self.options)

    @property
    def size(self) -> Any:
        """Tokens drafted a step: a number, or "auto"."""
        if self.engine.drafter.name == "none" or self.options.get("drafter") is False:
            return 0
        return self.options.get("size", self.engine.options.size)


@dataclass(slots=True)
class Run:
    """One prompt under one configuration. ``seconds``: wall time of the group it ran in, divided among its requests."""

    prompt: PromptRow
    turn: int
    configuration: str
    result: Result
    seconds: float
    difference: Difference | None  # against the first configuration
    joules: float | None = None  # of the machine, divided likewise; None: not known
    loop: int = 0  # tokens at the end that repeat those before them; the first configuration's answer decides

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
            "loop": self.loop,
            "finish_reason": self.result.finish_reason,
            "seconds": self.seconds,
            "joules": self.joules,
            "stats": stats.to_dict(),
        }


@dataclass(slots=True)
class Bench:
    """Runs the prompts and keeps what it has, so that an interrupted run still reports.

    ``control``: run the first configuration again, as the last one.
    """

    configurations: Sequence[Configuration]
    params: SamplingParams
    all_turns: bool = False
    control: bool = False
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
        again = [replace(self.configurations[0], name=CONTROL)] if self.control else []
        for configuration in [*self.configurations, *again]:
            begun, before = time.perf_counter(), machine.joules()
            results = configuration.generate(prompts, self.params)
            after = machine.joules()
            joules = None if before is None or after is None or after < before else (after - before) / len(rows)
            seconds = (time.perf_counter() - begun) / len(rows)
            baseline = baseline or results
            for row, prompt, first, result in zip(rows, prompts, baseline, results, strict=True):
                noise, answers = Noise(first.seed, first.sample), (first.token_ids, result.token_ids)
                difference = compare(configuration.engine, prompt, self.params, noise, *answers)
                loop = repeated_tail(first.token_ids)
                finished.append(Run(row, turn, configuration.name, result, seconds, difference, joules, loop))
        self.runs += finished  # all or none, so that an interruption leaves whole comparisons
        return baseline

    def report(self) -> list[dict[str, Any]]:
        """One entry a configuration, with ``by_category`` and ``without_loops`` of the same fields."""
        out = []
        for configuration in self.configurations:
            categories = dict.fromkeys(run.prompt.category for run in self.runs)
            engine = configuration.engine
            entry = {
                "name": configuration.name,
                "drafter": engine.drafter.name,
                "size": configuration.size,
                "acceptance": engine.options.acceptance,
                **self.figures(configuration.name),
            }
            entry["without_loops"] = self.figures(configuration.name, loops=False)
            entry["by_category"] = {name: self.figures(configuration.name, name) for name in categories}
            out.append(entry)
        return out

    def figures(self, name: str, category: str | None = None, *, loops: bool = True) -> dict[str, Any]:
        """Of a configuration, or of the control, over a category or all prompts; or without answers that end in a
        loop."""
        chosen = [run for run in self.runs if category is None or run.prompt.category == category]
        chosen = [run for run in chosen if loops or not run.loop]
        own = [run for run in chosen if run.configuration == name]
        first = [run for run in chosen if run.configuration == self.configurations[0].name]
        stats, base = (pooled(run.result.stats for run in runs) for runs in (own, first))
        ratio = speedup([run.result.stats for run in first], [run.result.stats for run in own])
        whole = [[(run.result.stats.tokens, run.seconds) for run in runs] for runs in (first, own)]
        seconds = sum(run.seconds for run in own)
        joules = [run.joules for run in own if run.joules is not None]
        return {
            "prompts": len(own),
            "identical": sum(run.difference is None for run in own),
            "looping": sum(run.loop > 0 for run in own),
            "loop_tokens": sum(run.loop for run in own),
            "near_ties": sum(run.difference is not None and run.difference.near_tie for run in own),
            "tokens": stats.tokens,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
            "end_to_end_tokens_per_second": stats.tokens / seconds if seconds else 0.0,
            "joules_per_token": sum(joules) / stats.tokens if joules and len(joules) == len(own) else None,
            "tokens_per_step": stats.tokens_per_step,
            "acceptance_rate": stats.acceptance_rate,
            "acceptance_by_position": stats.acceptance_by_position,
            "speedup": ratio,
            "end_to_end_speedup": paired(*whole),
            "moved": (ratio["ratio"] or 0.0) * base.tokens_per_step > stats.tokens_per_step,
        }


def speedup(before: Sequence[Stats], after: Sequence[Stats]) -> dict[str, float | None]:
    """The ratio of pooled decode speeds, after / before, and its 95 % interval (bootstrap over pairs, fixed seed).

    None where either has no speed: answers of one delta alone.
    """
    return paired(*([(s.tokens - s.first_delta_tokens, s.decode_seconds) for s in runs] for runs in (before, after)))


def paired(before: Sequence[tuple[int, float]], after: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    """As ``speedup``, of answers' tokens and seconds."""
    work = np.array([*before, *after], np.float64).reshape(2, len(before), 2)
    picks = np.random.default_rng(0).integers(0, max(len(before), 1), (_RESAMPLES, len(before)))

    def ratios(sums: F64) -> F64:  # of tokens and seconds [2, ..., 2]
        speeds: F64 = sums[..., 0] / sums[..., 1]
        ratio: F64 = speeds[1] / speeds[0]
        return ratio

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, drawn = float(ratios(work.sum(1))), ratios(work[:, picks].sum(2))
    if not np.isfinite(ratio) or ratio == 0:
        return {"ratio": None, "low": None, "high": None}
    low, high = np.quantile(drawn[np.isfinite(drawn)], [0.025, 0.975])
    return {"ratio": ratio, "low": float(low), "high": float(high)}


def interval(figures: Mapping[str, Any]) -> tuple[float, float, float]:
    """Decode tokens/s of figures, and where the interval of their speedup begins and ends on the same scale."""
    speed, ratio = figures["decode_tokens_per_second"], figures["speedup"]
    if not ratio["ratio"]:
        return speed, speed, speed
    low, high = (speed * ratio[end] / ratio["ratio"] for end in ("low", "high"))
    return speed, min(low, speed), max(high, speed)  # of a single answer all are the same, but for rounding


def written(ratio: Mapping[str, float | None]) -> str:
    """A speedup with its interval, where there is one."""
    if ratio["ratio"] is None:
        return "-"
    spread = f" ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio["low"] != ratio["high"] else ""
    return f"{ratio['ratio']:.2f}x{spread}"


def about_whole(configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of ``Bench.report``: speeds of whole answers, the reading of their prompts included, over the first's."""
    for entry in configs[1:]:
        yield f"end to end over {configs[0]['name']}'s: {entry['name']} {written(entry['end_to_end_speedup'])}"


def about_loops(configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of ``Bench.report``: how many answers end in a loop, which drafts far better than other text, and the figures
    without them."""
    first = configs[0]
    if not first["looping"]:
        yield "loops: no answer ends in one"
        return
    share = f"{first['looping']} of {first['prompts']} answers, {first['loop_tokens']} of {first['tokens']} tokens"
    yield f"loops at the end of answers: {share}"
    if first["looping"] < first["prompts"]:
        for entry in configs[1:]:
            rest = entry["without_loops"]
            figures = f"{written(rest['speedup'])}, {rest['tokens_per_step']:.2f} tokens/step"
            yield f"without these answers: {entry['name']} {figures}"


def doubt(name: str, figures: Mapping[str, Any]) -> str:
    """What is to be said of a speedup that tokens a step cannot explain; "" where they can."""
    if not figures["moved"]:
        return ""
    speed, most = figures["speedup"]["ratio"], figures["tokens_per_step"]
    return (
        f"{name}'s {speed:.3f}x is more than {most:.3f} tokens a step can give: the machine moved between the runs, or "
        "the answers are too short to tell"
    )
