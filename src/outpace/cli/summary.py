"""What commands say of an answer: its figures, what drafting did, log-probabilities, and what to be wary of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outpace.cli.terminal import table

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.engine.results import Result
    from outpace.engine.statistics import Stats
    from outpace.params import SamplingParams


def summary(engine: Engine, result: Result, params: SamplingParams) -> list[str]:
    """An answer's figures, what drafting did, and what to be wary of, in lines."""
    info = engine.model.info
    lines = ["; ".join([result.stats.summary, f"{info.backend} {info.dtype}", *seed_of(params, result.seed)])]
    if result.drafter != "none":
        lines.append(f"{result.drafter}: {account(engine, result.stats)}")
    return [*lines, *cautions(result, params), *result.notes]


def seed_of(params: SamplingParams, drawn: int | None = None) -> list[str]:
    """The seed, or the one that was ``drawn``, where answers depend on it."""
    return [] if params.greedy else [f"seed {params.seed if drawn is None else drawn}"]


def account(engine: Engine, stats: Stats) -> str:
    """What drafting brought and cost, in words."""
    policy = engine.policy
    return stats.account(None if policy is None else policy.plain_steps)


def cautions(result: Result, params: SamplingParams) -> list[str]:
    """Where the answer is not what a newcomer takes it for: cut off, or a loop, whose speed says little."""
    said, total = [], result.completion_tokens
    if result.finish_reason == "length":
        more = "--max-tokens" if total == params.max_tokens else "a greater --max-length, up to the model's,"
        said.append(f"cut off after {total} {'token' if total == 1 else 'tokens'}: {more} allows more")
    return [*said, *looping(result.token_ids)]


def looping(tokens: Sequence[int]) -> list[str]:
    """That an answer ends in a loop, where it does."""
    from outpace.common.arrays import repeated_tail

    tail = repeated_tail(tokens)
    return [f"the last {tail} of {len(tokens)} tokens are a loop, which drafts far better than other text"] * (tail > 0)


def show_scores(result: Result) -> None:
    """Print a table of the log-probabilities that a result has, if any."""
    for title, entries in (("prompt", result.prompt_logprobs), ("answer", result.logprobs)):
        if not entries:
            continue
        rows = [
            [f"{one.logprob:15.3f}", repr(one.text), ", ".join(f"{o.text!r} {o.logprob:.3f}" for o in one.top)]
            for one in entries
            if one is not None
        ]
        lines = table(("log-probability", f"token of the {title}", "likeliest there"), rows, left=3)
        print(f"\n{lines}")
