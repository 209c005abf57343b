"""What was asked, and what happened: ``Request`` and ``StepRecord``, frozen values; and the keywords that ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from outpace.common.arrays import I32
from outpace.common.files import StrPath
from outpace.models.options import LoadKeywords
from outpace.params import Acceptance, SamplingKeywords, SamplingParams

if TYPE_CHECKING:
    from outpace.control.cost import Cost
    from outpace.params import Acceptance


class EngineKeywords(TypedDict, total=False):
    """Fields of ``EngineOptions`` as keywords. Written by scripts/tables.py."""

    size: Size
    acceptance: Acceptance
    max_rows: int
    prefill_chunk: int
    prefill_delay: float | None
    step_stretch: float | None
    prefix_rows: int


class OwnKeywords(TypedDict, total=False):
    """Parameters of ``Engine`` itself that ``Engine.load`` hands on. Written by scripts/tables.py."""

    on_step: Callable[[StepRecord], None] | None
    cost: Cost | None
    cache_dir: StrPath | None
    cache_size: int | str | None


class EngineLoadKeywords(LoadKeywords, EngineKeywords, OwnKeywords, total=False):
    """What ``Engine.load`` takes by name, beside the parameters in its signature."""


class OwnRequestKeywords(TypedDict, total=False):
    """Parameters of ``Engine.prepare``. Written by scripts/tables.py."""

    raw: bool
    add_special_tokens: bool
    drafter: str | bool | None
    size: Size | None
    acceptance: Acceptance | None
    reuse_prefix: bool
    cache_scope: str
    deadline: float | None
    priority: int
    owner: str
    resume: Sequence[int] | Sequence[Sequence[int]] | None
    verify_resume: bool
    shown_tokens: Sequence[int]


class RequestKeywords(OwnRequestKeywords, SamplingKeywords, total=False):
    """What a request takes by name."""


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
    row: int  # in the KV cache
    start: int
    count: int


class Likely(NamedTuple):
    """A token with the target's probability, and the Gumbel noise that its choice added to log p (0: none)."""

    token: int
    p: float
    noise: float


class Trial(NamedTuple):
    """A candidate under ``rejection``: accepted where ``uniform`` is below ``chance``, min(1, p / q)."""

    node: int
    chance: float
    uniform: float
    accepted: bool


class Place(NamedTuple):
    """Where the target chose: after ``node`` (-1: the pending token). ``choice``: the token that follows there (-1: it
    was not asked). ``likeliest``: five tokens, the choice, and what was drafted there. Under ``rejection`` ``trials``
    of its children, the five likeliest of the ``residual`` that its token was drawn from, and ``q`` of the
    ``likeliest`` where a drafter drew there."""

    node: int
    choice: int
    likeliest: tuple[Likely, ...]
    trials: tuple[Trial, ...] = ()
    residual: tuple[Likely, ...] = ()
    q: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RowRecord:
    """A decoding row of a step: k proposed nodes, those that were kept and verified, and the verdict."""

    request: int
    sample: int
    row: int  # in the KV cache
    start: int  # committed tokens before the step
    tokens: tuple[int, ...]  # [k] proposed
    parents: tuple[int, ...]  # [k]; -1 is the pending token
    confidence: tuple[float, ...]  # [k], or none
    sources: tuple[str, ...]  # [k] who proposed it
    kept: tuple[int, ...]  # proposed nodes that were verified, ascending
    verdict: tuple[int, ...]  # accepted tokens, then the target's own
    path: tuple[int, ...]  # accepted nodes, as proposed ones
    gained: int  # tokens committed: a stop may cut the verdict's
    near_ties: int  # of them, those that another order of sums might have chosen otherwise
    size: int  # what the policy decided
    expected: float | None = None  # speed over plain decoding; None: there was no draft to judge, or its size is fixed
    why: str = ""
    worth: tuple[float, ...] = ()  # [k], or none: the chance of each node's whole path, as the policy sees it
    drawn: bool = False  # the nodes were drawn from distributions, which are not here
    # With Engine.probabilities, after all rules, filters and the temperature:
    p: tuple[float, ...] = ()  # [k] the target's, of each node's token; NaN: it was not verified
    q: tuple[float, ...] = ()  # [k] the drafter's; NaN: not known, since coupled needs none
    places: tuple[Place, ...] = ()  # after the pending token and each verified node

    @property
    def output(self) -> tuple[int, ...]:
        """The tokens committed."""
        return self.verdict[: self.gained]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: its decoding rows, chunks of prompts, wall seconds by phase (draft, target, verify, other), and what
    failed in it and was survived."""

    index: int
    rows: tuple[RowRecord, ...]
    chunks: tuple[ChunkRecord, ...]
    seconds: Mapping[str, float]
    faults: tuple[str, ...] = ()

    @property
    def requests(self) -> list[int]:
        """Ids of the requests that had a part in it."""
        return list(dict.fromkeys([*(row.request for row in self.rows), *(chunk.request for chunk in self.chunks)]))
