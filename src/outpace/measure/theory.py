"""The theory of speculative decoding in closed form (Leviathan et al., arXiv 2211.17192, section 3).

A chain of k drafted tokens, each accepted with probability a given that the one before it was, gives
(1 - a^(k+1)) / (1 - a) tokens a step. The step costs w(k) of a plain one for the forward, and k times the draft cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.errors import Argument, ParameterError

LONGEST = 64  # the largest size that is looked at


@dataclass(frozen=True, slots=True)
class StepCosts:
    """In plain steps: ``draft`` of one drafted token; ``width`` of a forward that verifies ``size`` of them.

    The width's cost of other sizes is on the line through 1 at size 0.
    """

    draft: float
    width: float
    size: int

    def step(self, k: int) -> float:
        """What a step with ``k`` drafted tokens costs."""
        return 1.0 + (self.width - 1.0) * k / max(self.size, 1) + self.draft * k


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect. ``break_even``: the acceptance at which ``size`` only just pays (None: none does)."""

    alpha: float
    size: int
    tokens_per_step: float
    speedup: float
    best_size: int
    best_speedup: float
    break_even: float | None


def tokens_per_step(alpha: float, size: int) -> float:
    """Expected tokens of a step: accepted ones and the target's own."""
    return size + 1.0 if alpha == 1.0 else (1.0 - alpha ** (size + 1)) / (1.0 - alpha)


def outlook(alpha: float, size: int, costs: StepCosts) -> Outlook:
    """Expectations at one acceptance and size. Raises ParameterError that names a value out of range."""
    for name, value, low, high in (
        ("alpha", alpha, 0.0, 1.0),
        ("size", size, 0, LONGEST - 1),
        ("draft cost", costs.draft, 0.0, 1e6),
        ("width cost", costs.width, 1e-6, 1e6),
    ):
        if not low <= value <= high:
            raise ParameterError(f"{name} {value:g} is out of range: give {low:g} to {high:g}")
    best = max(range(LONGEST), key=lambda k: (tokens_per_step(alpha, k) / costs.step(k), -k))
    return Outlook(
        alpha,
        size,
        tokens_per_step(alpha, size),
        tokens_per_step(alpha, size) / costs.step(size),
        best,
        tokens_per_step(alpha, best) / costs.step(best),
        break_even(size, costs),
    )


def break_even(size: int, costs: StepCosts) -> float | None:
    """The acceptance at which a step of ``size`` gives as many tokens as it costs; None when even 1 is too little."""
    cost = costs.step(size)
    if size == 0 or tokens_per_step(1.0, size) < cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, size) < cost else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class Measured:
    """What a configuration of ``outpace bench`` was measured to do."""

    name: str
    alpha: float  # of a drafted token, given that the one before it was accepted
    covered: float  # share of steps that had a draft
    size: float  # mean nodes of a draft
    costs: StepCosts
    tokens_per_step: float
    speedup: float


def from_bench(value: dict[str, Any]) -> list[Measured]:
    """The drafting configurations of a file that ``outpace bench --json`` wrote, against its first one.

    Raises ParameterError when the file lacks what is needed.
    """
    try:
        first = value["configs"][0]["name"]
        if any(run["stats"]["drafted"] for run in value["runs"] if run["config"] == first):
            raise ParameterError(
                f"the file's first configuration, {first}, drafts: put ", Argument("drafter", "none"), " first"
            )
        plain = _pooled(value["runs"], first)
        seconds = plain["seconds"] / plain["steps"]
        found = []
        for config in value["configs"][1:]:
            counts = _pooled(value["runs"], config["name"])
            if not counts["drafted"]:
                continue
            found.append(_measured(config, counts, seconds))
        return found
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ParameterError(
            f"the file is no result of outpace bench --json, or of an older one ({error!r}): run it again"
        ) from error


def _pooled(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Sums over a configuration's runs; lists by position."""
    total: dict[str, Any] = {"steps": 0, "tokens": 0, "drafted": 0, "seconds": 0.0, "draft": 0.0}
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    for run in runs:
        if run["config"] != name:
            continue
        stats = run["stats"]
        for key in ("steps", "tokens", "drafted"):
            total[key] += stats[key]
        total["seconds"] += sum(stats["seconds"].values())
        total["draft"] += stats["seconds"]["draft"]
        for sums, more in ((drafted_at, stats["drafted_at"]), (accepted_at, stats["accepted_at"])):
            sums.extend([0] * (len(more) - len(sums)))
            for i, n in enumerate(more):
                sums[i] += n
    return {**total, "drafted_at": drafted_at, "accepted_at": accepted_at}


def _measured(config: dict[str, Any], counts: dict[str, Any], plain: float) -> Measured:
    drafted_at, accepted_at = counts["drafted_at"], counts["accepted_at"]
    tried = drafted_at[0] + sum(min(d, a) for d, a in zip(drafted_at[1:], accepted_at, strict=False))
    drafts = drafted_at[0]
    size = counts["drafted"] / drafts
    draft = counts["draft"] / counts["drafted"] / plain
    step = counts["seconds"] / counts["steps"] / plain  # the mean over steps with and without a draft
    covered = drafts / counts["steps"]
    width = 1.0 + max(step - 1.0 - draft * size * covered, 0.0) / covered
    tokens = counts["tokens"] / counts["steps"]
    costs = StepCosts(draft, width, max(round(size), 1))
    return Measured(
        config["name"], sum(accepted_at) / tried, covered, size, costs, tokens, float(config["speedup"]["ratio"])
    )
