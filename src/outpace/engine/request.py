"""What was asked, and what happened: ``Request`` and ``StepRecord``, frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outpace.common.arrays import I32
from outpace.control.adaptive import Decision
from outpace.exact.drafts import Drafts, Verdicts
from outpace.params import Acceptance, SamplingParams

Size = int | Literal["auto"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it was accepted: everything its tokens depend on, and how it is to be served."""

    id: int
    prompt: I32  # token ids [P]
    params: SamplingParams
    seed: int  # the one that was asked for, or drawn
    limit: int  # most committed tokens of a sample, the prompt included
    size: int  # most nodes a step; 0: plain decoding
    adaptive: bool  # whether the policy chooses how many of them
    acceptance: Acceptance
    drafter: str  # the name of the drafter; "none": plain decoding
    reuse_prefix: bool = True  # take and leave KV of beginnings that other requests share
    priority: int = 0  # higher runs first, and is preempted last
    deadline: float | None = None  # seconds after ``add``; then it ends as it is
    added: float = 0.0  # on the engine's clock (time.perf_counter)
    cache_scope: str = ""  # requests of one scope alone share KV
    owner: str = ""  # owners take turns within a priority


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A prefill chunk of a step: positions ``start .. start + count - 1`` of a row."""

    request: int
    sample: int
    row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, whole: B decoding rows, their drafts before and after the policy, and what became of them.

    ``kept`` are nodes of ``proposed``, in their order, with their parents renumbered. ``gained[i]``: tokens that row i
    committed (a stop may cut the verdict's); ``near_ties[i]``: how many of them another order of sums might have chosen
    otherwise. ``seconds``: wall time by phase (draft, target, verify, other).
    """

    index: int
    requests: tuple[int, ...]  # [B]
    samples: tuple[int, ...]  # [B]
    rows: tuple[int, ...]  # [B] in the KV cache
    starts: tuple[int, ...]  # [B] committed tokens before the step
    proposed: Drafts
    kept: Drafts
    verdicts: Verdicts
    gained: tuple[int, ...]  # [B]
    near_ties: tuple[int, ...]  # [B]
    decisions: tuple[Decision, ...]  # [B]
    chunks: tuple[ChunkRecord, ...]
    seconds: Mapping[str, float]
    faults: tuple[str, ...] = ()  # what failed in it and was survived

    def __len__(self) -> int:
        return len(self.rows)
