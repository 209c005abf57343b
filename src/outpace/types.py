"""Frozen values that travel between the rooms: parameters in, drafts and verdicts between, results out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from outpace.errors import ParameterError

if TYPE_CHECKING:
    from outpace.rules import LogitRule
    from outpace.statistics import Stats

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

Acceptance = Literal["coupled", "rejection", "typical"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "typical")
FinishReason = Literal["stop", "length", "cancelled", "error"]
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

MIN_TEMPERATURE = 1e-3
MAX_TOP_LOGPROBS = 100
MAX_BIAS = 1e30  # beyond it a float32 logit could overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the target's distribution, and when to stop.

    The order is: logit rules (penalties, bias, allowed tokens, ``rules``), temperature, top-k, top-p, min-p.
    ``temperature=0`` is greedy. Raises ParameterError (a ValueError) that names the parameter.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off; ties are cut by lowest token id
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits; counts prompt and output
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: Sequence[int] | None = None
    rules: Sequence[LogitRule] = ()
    seed: int | None = None  # None draws one; the result reports it
    max_tokens: int | None = 256  # None: up to the model's context
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0  # alternatives a token, 0 to 100; implies logprobs

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0, "0 is greedy, 1 the model's own distribution")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ParameterError(
                f"temperature={self.temperature} is too close to 0 to divide by: use 0 (greedy) or at least 0.001"
            )
        _integer("top_k", self.top_k, 0, 2**31 - 1, "0 turns it off")
        _in_range("top_p", self.top_p, 0.0, 1.0, "1 turns it off", above=True)
        _in_range("min_p", self.min_p, 0.0, 1.0, "0 turns it off")
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 turns it off")
        _in_range("presence_penalty", self.presence_penalty, -100.0, 100.0, "0 turns it off")
        _in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "0 turns it off")
        if not isinstance(self.logit_bias, Mapping):
            raise ParameterError(f"logit_bias={self.logit_bias!r} is no mapping: give {{token id: bias}}")
        for token, bias in self.logit_bias.items():
            _integer("a token id in logit_bias", token, 0, 2**31 - 1, "give token ids, not text")
            if not _is_number(bias) or not (bias == -math.inf or abs(bias) <= MAX_BIAS):
                raise ParameterError(
                    f"logit_bias[{token}]={bias!r}: give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                    "or -inf to forbid the token"
                )
        if self.allowed_tokens is not None:
            _ids("allowed_tokens", self.allowed_tokens)
            if len(self.allowed_tokens) == 0:
                raise ParameterError(
                    "allowed_tokens is empty, so no token could be chosen: give at least one id, or None"
                )
        if not isinstance(self.rules, Sequence) or isinstance(self.rules, str):
            raise ParameterError(f"rules={self.rules!r} is no list: give a list of logit rules")
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1, "None draws one")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "None decodes to the end of the context")
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
            raise ParameterError(f"stop={self.stop!r} is no text: give a string or a list of strings")
        if "" in stops and self.stop != "":
            raise ParameterError("stop has an empty string, which would match everywhere: remove it")
        object.__setattr__(self, "stop", tuple(text for text in stops if text))
        _ids("stop_ids", self.stop_ids)
        _integer("n", self.n, 1, 1024, "it is the number of samples")
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, "0 reports only the chosen token")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ParameterError(f"{name}={getattr(self, name)!r} is neither True nor False: give one of them")
        self._as_python()

    def _as_python(self) -> None:
        """numpy scalars become Python's: theirs round to their own width, and cannot be written as JSON."""
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, kind(value))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # __post_init__ made it a tuple

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated anew."""
        return replace(self, **changes)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("top_k", "seed", "max_tokens", "n", "top_logprobs"), int),
    **dict.fromkeys(("ignore_eos", "logprobs"), bool),
    **dict.fromkeys(("allowed_tokens", "stop_ids"), lambda ids: tuple(int(i) for i in ids)),
    "logit_bias": lambda biases: {int(token): float(bias) for token, bias in biases.items()},
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _in_range(name: str, value: float, low: float, high: float, hint: str, *, above: bool = False) -> None:
    if not _is_number(value) or not (low < value <= high if above else low <= value <= high):
        least = f"above {low:g}" if above else f"at least {low:g}"
        raise ParameterError(f"{name}={value!r} is out of range: give a number {least} and at most {high:g} ({hint})")


def _integer(name: str, value: int, low: int, high: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ParameterError(f"{name}={value!r} is out of range: give a whole number from {low} to {high} ({hint})")


def _ids(name: str, ids: Sequence[int]) -> None:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, np.ndarray, Set)):
        raise ParameterError(f"{name}={ids!r} is no list: give a list of token ids")
    for token in ids:
        _integer(f"a token id in {name}", token, 0, 2**31 - 1, "give token ids, not text")


@dataclass(frozen=True, slots=True)
class Draft:
    """One row's proposal: a view into ``Drafts``. ``parents[i]`` is a node before i, or -1: the pending token."""

    tokens: I32  # [k]
    parents: I32 | None = None  # [k]; None: a chain
    q: F64 | None = None  # [k, V]; None: one-hot

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else int(self.parents[node])

    def path(self, node: int) -> I32:
        """The nodes int32 [depth] from the first after the pending token down to ``node`` (-1: none)."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parent(node)
        return np.array(nodes[::-1], np.int32)

    def children(self, node: int) -> list[int]:
        """Children of draft node ``node`` (-1: of the pending token), in the order in which they were proposed."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self) else []
        return [int(i) for i in np.flatnonzero(self.parents == node)]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was drafted for a batch in one step: B rows, at most W nodes each.

    ``tokens`` int32 [B, W]; ``widths`` int32 [B]: nodes in use; ``parents`` int32 [B, W], each smaller than its own
    index, -1 the pending token (None: chains); ``q`` float64 [B, W, V], the distribution each node was drawn from
    (None: one-hot, a deterministic drafter); ``confidence`` float32 [B, W]; ``source`` uint8 [B, W] into ``sources``.
    """

    tokens: I32
    widths: I32
    parents: I32 | None = None
    q: F64 | None = None
    confidence: F32 | None = None
    source: npt.NDArray[np.uint8] | None = None
    sources: tuple[str, ...] = ()

    @staticmethod
    def empty(rows: int) -> Drafts:
        return Drafts(np.zeros((rows, 0), np.int32), np.zeros(rows, np.int32))

    @staticmethod
    def chains(proposals: Sequence[Sequence[int] | I32], source: str = "") -> Drafts:
        """Chains of token ids, one list a row, from a deterministic drafter."""
        widths = np.array([len(p) for p in proposals], np.int32)
        tokens = np.zeros((len(proposals), int(widths.max(initial=0))), np.int32)
        for i, proposal in enumerate(proposals):
            tokens[i, : len(proposal)] = proposal
        return Drafts(tokens, widths, sources=(source,) if source else ())

    def __len__(self) -> int:
        return len(self.widths)

    def row(self, i: int) -> Draft:
        k = int(self.widths[i])
        return Draft(
            self.tokens[i, :k],
            None if self.parents is None else self.parents[i, :k],
            None if self.q is None else self.q[i, :k],
        )

    def among(self, where: Sequence[int], rows: int) -> Drafts:
        """These drafts as those of rows ``where`` [B] of a batch of ``rows``; the others have none."""
        if len(where) == rows:
            return self

        def wide(values: npt.NDArray[Any] | None) -> Any:
            if values is None:
                return None
            out = np.zeros((rows, *values.shape[1:]), values.dtype)
            out[where] = values
            return out

        arrays = ("tokens", "widths", "parents", "q", "confidence", "source")
        return replace(self, **{name: wide(getattr(self, name)) for name in arrays})

    def sources_of(self, i: int) -> list[str]:
        """Who drafted each node of row i."""
        k = int(self.widths[i])
        if self.source is None:
            return [self.sources[0] if self.sources else "draft"] * k
        return [self.sources[number] for number in self.source[i, :k].tolist()]

    def source_of(self, i: int, node: int) -> str:
        """Who drafted node ``node`` of row i."""
        if not self.sources:
            return "draft"
        return self.sources[0 if self.source is None else int(self.source[i, node])]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row's outcome: ``tokens`` gained (accepted, then recovered or bonus), and the ``path`` of nodes kept."""

    tokens: I32  # [accepted + 1]
    path: I32  # [accepted] draft nodes

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Outcomes of a batch: ``tokens`` int32 [B, D + 1], ``accepted`` int32 [B], ``path`` int32 [B, D] (draft nodes)."""

    tokens: I32
    accepted: I32
    path: I32

    def __len__(self) -> int:
        return len(self.accepted)

    def __iter__(self) -> Iterator[Verdict]:
        return (self.row(i) for i in range(len(self)))

    def row(self, i: int) -> Verdict:
        a = int(self.accepted[i])
        return Verdict(self.tokens[i, : a + 1], self.path[i, :a])

    @staticmethod
    def of(rows: Sequence[Verdict]) -> Verdicts:
        if len(rows) == 1:  # the step of one request, where every microsecond shows
            tokens, path = rows[0].tokens, rows[0].path
            return Verdicts(tokens[None], np.array([len(path)], np.int32), path[None])
        deepest = max((v.accepted for v in rows), default=0)
        tokens = np.zeros((len(rows), deepest + 1), np.int32)
        path = np.zeros((len(rows), deepest), np.int32)
        for i, verdict in enumerate(rows):
            tokens[i, : verdict.accepted + 1] = verdict.tokens
            path[i, : verdict.accepted] = verdict.path
        return Verdicts(tokens, np.array([v.accepted for v in rows], np.int32), path)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-softmax of the target (before rules and temperature), in nats, at one committed token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), best first


TARGET = "target"  # the source of recovered and bonus tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request gained since its last delta. The last one has a ``finish_reason`` and the ``result``."""

    request: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]  # who wrote each token: a drafter's name, or "target"
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One finished sample of one request."""

    request: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    drafter: str
    acceptance: Acceptance
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    stopped_by: str | int | None = None  # the stop string or token id
    error: str | None = None
    notes: tuple[str, ...] = ()  # what was turned off or lossy, and why

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)
