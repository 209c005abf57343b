"""What a request may ask for: ``SamplingParams``, validated, and the seam for logit rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from outpace.arrays import F32, I32
from outpace.errors import ParameterError

Acceptance = Literal["coupled", "rejection", "typical"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "typical")
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

MIN_TEMPERATURE = 1e-3
MAX_TOP_LOGPROBS = 100
MAX_BIAS = 1e30  # beyond it a float32 logit could overflow


@runtime_checkable
class LogitRule(Protocol):
    """A change to the logits that depends on the tokens so far."""

    def start(self, prompt: I32) -> Any:
        """The state after ``prompt`` int32 [P]."""

    def advance(self, state: Any, token: int) -> Any:
        """The state one output token further; ``state`` itself is not changed."""

    def apply(self, state: Any, logits: F32) -> None:
        """Change float32 ``logits`` [V] in place. -inf forbids a token."""


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
