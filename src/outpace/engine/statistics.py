"""What is counted and how it is defined, once, for a request, for an engine, and for reports.

Definitions (docs/statistics.md has the same words):

- step: one target forward in which a row decodes. Prefill chunks are not steps.
- tokens per step: committed output tokens / steps.
- acceptance rate: accepted / drafted.
- acceptance by draft position i: of the drafts that had an i-th node on a path of that depth, how many accepted it.
- seconds: a request that shares steps with others is charged each step's whole wall time, for it waits that long.
- queue: from ``add`` to its first row, or to its end where it never had one.
- time to first token: from ``add`` to the first delta. decode tokens/s: (tokens after the first delta) / (time after
  the first delta to the last). end-to-end tokens/s: tokens / (time from ``add`` to the last delta).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Clock:
    """Splits a step's wall time among its phases: draft, target, verify, other."""

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "target": 0.0, "verify": 0.0, "other": 0.0}
        self._phase, self._since = "other", time.perf_counter()

    def start(self, phase: str) -> None:
        """What follows belongs to ``phase``."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def so_far(self) -> dict[str, float]:
        """Seconds by phase until now."""
        self.start(self._phase)
        return self._seconds


_NOTHING = "no draft was made: the answer repeated nothing from before, or drafts had not paid lately"
_TRAINED = ("eagle", "peagle", "parallel", "dflash", "dspark", "medusa", "drafter", "mtp", "model")
_ENOUGH, _USELESS = 64, 40  # drafted tokens that tell, and of how many less than one is next to nothing
_FEW = 8  # drafted steps that say nothing about a text
PHASES = ("draft", "target", "verify", "other")


class Counted(NamedTuple):
    """One step of a row, for ``Stats.add``; see ``count``, ``decide`` and ``ran_on``."""

    kept: int
    levels: int
    sources: Sequence[str]
    path: Sequence[int]
    size: int
    expected: float | None
    threads: int | None
    near_ties: int = 0


@dataclass(slots=True)
class Stats:
    """Counts of one request, or of many when merged with ``pooled``, and times in seconds.

    ``steps``: target forwards in which the row decoded; ``tokens``: committed output tokens; ``drafted``, ``accepted``:
    draft tokens, ``drafted_at``, ``accepted_at`` by depth from 0, ``drafted_by``, ``accepted_by`` by source.
    ``steps_by_size``: steps by nodes verified, ``steps_by_threads``: by threads, where the backend says how many
    computed. ``near_ties``: tokens that another order of sums might have chosen otherwise. ``expected``: for "on"
    and "off", [steps, sum of the logarithm of the speed-up that was expected].
    ``prompt_tokens``; ``reused_tokens``: those whose KV another row had; ``preemptions``: times that the row was given
    up for others and computed again; ``kv_bytes``: reserved for the row, drafter included (pooled: the maximum).
    ``queue_seconds``: from ``add`` to the first row; ``prefill_seconds``; ``seconds``: of decoding, by phase;
    ``time_to_first_token``: from ``add`` to the first delta (pooled: the mean), which had ``first_delta_tokens``;
    ``decode_seconds``: from the first delta to the last; ``total_seconds``: from ``add`` to the last. ``requests``: how
    many are counted.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    accepted_by: dict[str, int] = field(default_factory=dict)
    drafted_by: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    preemptions: int = 0
    reused_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    first_delta_tokens: int = 0
    time_to_first_token: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    steps_by_size: dict[int, int] = field(default_factory=dict)
    expected: dict[str, list[float]] = field(default_factory=dict)
    steps_by_threads: dict[int, int] = field(default_factory=dict)
    kv_bytes: int = 0
    near_ties: int = 0
    requests: int = 1

    @property
    def tokens_per_step(self) -> float:
        """Tokens over steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """By depth: of the drafts that had a node there, the share that accepted one."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first delta over the time after it."""
        return (self.tokens - self.first_delta_tokens) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def end_to_end_tokens_per_second(self) -> float:
        """Tokens over the time from ``add`` to the last delta."""
        return self.tokens / self.total_seconds if self.total_seconds > 0 else 0.0

    def add(self, step: Counted) -> None:
        """Add one ``step``: see ``count``, ``decide`` and ``ran_on``."""
        kept, levels, sources, path, size, expected, threads, near_ties = step
        self.near_ties += near_ties
        self.count(kept, levels, sources, path)
        self.decide(size, expected)
        self.ran_on(threads)

    def count(self, kept: int, levels: int = 0, sources: Sequence[str] = (), path: Sequence[int] = ()) -> None:
        """Add one step's outcome: ``kept`` tokens were committed (a stop cuts some of the verdict's); of a draft with
        so many ``levels`` and nodes of ``sources``, ``path`` was accepted."""
        self.steps += 1
        self.tokens += kept
        if not levels:
            return
        self.drafted += len(sources)
        used = path[:kept]
        self.accepted += len(used)
        for d in range(levels):
            if d == len(self.drafted_at):
                self.drafted_at.append(0)
                self.accepted_at.append(0)
            self.drafted_at[d] += 1
            self.accepted_at[d] += int(d < len(used))
        for source in sources:
            self.drafted_by[source] = self.drafted_by.get(source, 0) + 1
        for node in used:
            source = sources[node]
            self.accepted_by[source] = self.accepted_by.get(source, 0) + 1

    def decide(self, size: int, expected: float | None) -> None:
        """Add what the policy decided for one step: ``size`` nodes were verified; ``expected``: the speed of the best
        draft over plain decoding (None: there was nothing to decide)."""
        self.steps_by_size[size] = self.steps_by_size.get(size, 0) + 1
        if expected is not None:
            sums = self.expected.setdefault("on" if size else "off", [0.0, 0.0])
            sums[0] += 1
            sums[1] += math.log(max(expected, 1e-3))

    def ran_on(self, threads: int | None) -> None:
        """Add that one step was computed with so many ``threads`` (None: not known)."""
        if threads is not None:
            self.steps_by_threads[threads] = self.steps_by_threads.get(threads, 0) + 1

    @property
    def drafted_steps(self) -> int:
        """Steps that verified a draft."""
        return sum(steps for size, steps in self.steps_by_size.items() if size)

    @property
    def decision(self) -> str:
        """What the policy decided: ``drafted in 150 of 200 steps, 1.62x expected; not in the others, 0.92x expected``.
        Empty before the first step."""
        total, drafted = sum(self.steps_by_size.values()), self.drafted_steps
        expected = {name: f"{math.exp(log / n):.2f}x expected" for name, (n, log) in self.expected.items()}
        if not drafted:
            none = f"no draft was expected to pay, the best {expected['off']}" if "off" in expected else _NOTHING
            return none if total else ""
        on = f"drafted in {drafted} of {total} steps" + (f", {expected['on']}" if "on" in expected else "")
        if drafted == total:
            return on
        return f"{on}; " + (f"not in the others, {expected['off']}" if "off" in expected else "no draft in the others")

    def account(self, plain_steps: Callable[[float], float] | None = None) -> str:
        """Why drafting made it faster or did not, in words: what a drafted step costs, and the tokens that it brought.

        ``plain_steps``: the time of a step that verifies so many drafted tokens, in plain steps (None: not known).
        """
        steps, drafted = sum(self.steps_by_size.values()), self.drafted_steps
        if not drafted:
            said = self.decision
            if plain_steps is not None and "off" in self.expected:
                said += f" (checking one drafted token takes {plain_steps(1):.2f} plain steps here)"
            return said
        each, kept = self.drafted / drafted, self.accepted / drafted
        brought = 1 + kept
        said = (
            f"drafted in {drafted} of {steps} steps, {each:.1f} tokens each, of which {kept:.2f} were accepted: "
            f"such a step brought {brought:.2f} tokens"
        )
        if plain_steps is None:
            return said
        cost = plain_steps(each)
        said = f"{said} and takes about {cost:.2f} plain steps here"
        if drafted < _FEW:
            return said
        if abs(brought - cost) <= 0.05 * cost:
            return f"{said}, so it was about as fast as plain decoding"
        return f"{said}, so drafting {'paid' if brought > cost else 'did not pay'}"

    @property
    def useless(self) -> dict[str, str]:
        """A remark on every trained drafter of which next to nothing was accepted, with what that is likely due to."""
        found = {}
        for source, drafted in self.drafted_by.items():
            accepted = self.accepted_by.get(source, 0)
            if source.split(":")[0] in _TRAINED and drafted >= _ENOUGH and accepted * _USELESS < drafted:
                found[source] = (
                    f"{source}: {accepted} of {drafted} drafted tokens were accepted: it was likely made for another "
                    "model, fine-tune, quantisation or chat template than this one: see outpace drafters, or use "
                    "suffix"
                )
        return found

    @property
    def summary(self) -> str:
        """The main figures, in a line."""
        accepted = f"; {self.accepted} of {self.drafted} drafted tokens accepted" if self.drafted else ""
        rate = self.decode_tokens_per_second or self.end_to_end_tokens_per_second
        speed = f"{self.tokens} {'token' if self.tokens == 1 else 'tokens'} at {rate:.0f} tokens/s"
        near = f"; {self.near_ties} near-tie{'s' if self.near_ties > 1 else ''}" if self.near_ties else ""
        return f"{speed}; {self.tokens_per_step:.2f} tokens a step{accepted}{near}"

    def __repr__(self) -> str:
        return f"Stats({self.requests} {'answer' if self.requests == 1 else 'answers'}, {self.summary})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the counts, and the figures derived from them."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_rate": self.acceptance_rate,
            "drafted_at": self.drafted_at,
            "accepted_at": self.accepted_at,
            "acceptance_by_position": self.acceptance_by_position,
            "drafted_by": self.drafted_by,
            "accepted_by": self.accepted_by,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "preemptions": self.preemptions,
            "near_ties": self.near_ties,
            "queue_seconds": self.queue_seconds,
            "prefill_seconds": self.prefill_seconds,
            "seconds": self.seconds,
            "time_to_first_token": self.time_to_first_token,
            "decode_seconds": self.decode_seconds,
            "total_seconds": self.total_seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "end_to_end_tokens_per_second": self.end_to_end_tokens_per_second,
            "steps_by_size": {str(size): n for size, n in sorted(self.steps_by_size.items())},
            "decision": self.decision,
            "steps_by_threads": {str(threads): n for threads, n in sorted(self.steps_by_threads.items())},
            "kv_bytes": self.kv_bytes,
            "requests": self.requests,
        }


def pooled(parts: Iterable[Stats]) -> Stats:
    """Sum counts and times, so that every ratio is pooled: total tokens / total steps, and so on."""
    total = Stats(requests=0)
    first_token = 0.0
    for part in parts:
        for name in (
            "steps",
            "tokens",
            "drafted",
            "accepted",
            "prompt_tokens",
            "reused_tokens",
            "preemptions",
            "near_ties",
            "first_delta_tokens",
        ):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "total_seconds", "requests"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.drafted_at = _add(total.drafted_at, part.drafted_at)
        total.accepted_at = _add(total.accepted_at, part.accepted_at)
        for named, more in ((total.drafted_by, part.drafted_by), (total.accepted_by, part.accepted_by)):
            for source, count in more.items():
                named[source] = named.get(source, 0) + count
        for counts, more_steps in (
            (total.steps_by_size, part.steps_by_size),
            (total.steps_by_threads, part.steps_by_threads),
        ):
            for number, steps in more_steps.items():
                counts[number] = counts.get(number, 0) + steps
        for name, sums in part.expected.items():
            total.expected[name] = _add_floats(total.expected.get(name, [0.0, 0.0]), sums)
        for phase in PHASES:
            total.seconds[phase] += part.seconds[phase]
        first_token += part.time_to_first_token * part.requests
        total.kv_bytes = max(total.kv_bytes, part.kv_bytes)
    total.time_to_first_token = first_token / total.requests if total.requests else 0.0
    return total


def _add_floats(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _add(a: list[int], b: list[int]) -> list[int]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]
