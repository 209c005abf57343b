"""What a request may ask for: ``SamplingParams``, validated, and the seam for logit rules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from outpace import habits
from outpace.arrays import F32, I32, U32
from outpace.errors import Argument, ParameterError

log = logging.getLogger(__name__)

Acceptance = Literal["coupled", "rejection", "typical"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection", "typical")
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]

MIN_TEMPERATURE = 1e-3
MAX_TOP_LOGPROBS = 100
MAX_BIAS = 1e30  # beyond it a float32 logit could overflow


@runtime_checkable
class LogitRule(Protocol):
    """A change to the logits that depends on the tokens so far. A pure function of its arguments: it sees drafts that
    may never be committed. What it raises ends its request, as a RuleError.

    A rule may have three methods more (``GrammarRule``). ``mask(state)`` gives the tokens it allows as bits, or None;
    where it gives bits, they are all that the rule does there: ``apply`` is not called, no logits are copied, and
    drafted nodes that it forbids are dropped before the forward. ``allows(state, token)`` says the same of one token.
    ``forced(state)`` gives tokens that must follow.
    """

    def start(self, prompt: I32) -> Any:
        """The state after ``prompt`` int32 [P]."""

    def advance(self, state: Any, token: int) -> Any:
        """The state one output token further; ``state`` itself is not changed."""

    def apply(self, state: Any, logits: F32) -> None:
        """Change float32 ``logits`` [V] in place. -inf forbids a token."""


class GrammarRule(LogitRule, Protocol):
    """A rule with all methods that a rule may have. ``allows`` needs ``mask``; nothing needs to inherit from here."""

    def mask(self, state: Any) -> U32 | None:
        """uint32 [ceil(V / 32)]: bit t % 32 of word t // 32 says that token t is allowed. Not to be changed by anyone.

        None: nothing is said in this state, ``apply`` is called.
        """

    def allows(self, state: Any, token: int) -> bool:
        """Whether ``mask(state)``, which is bits in every state, has ``token``; worth having where that costs less.

        The mask is then asked for only after a token that the target would choose without it turned out forbidden.
        """

    def forced(self, state: Any) -> Sequence[int]:
        """Tokens, in order, that are likely since the text must go on so; as many as are known, perhaps none.

        They are drafted, which costs nothing; never imposed: the target says them itself, under the mask, or others.
        """


T = TypeVar("T")


def _by_known_names(cls: type[T]) -> type[T]:
    """Let a parameter that there is none of be an error that says how it is spelled here, not a TypeError."""
    plain: Callable[..., None] = cls.__init__

    @wraps(plain)
    def __init__(self: Any, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise ParameterError(f"SamplingParams takes its parameters by name: give {unnamed[0]!r} one")
        unknown = given.keys() - cls.__dataclass_fields__.keys()  # type: ignore[attr-defined]
        if unknown:
            raise habits.refuse(unknown, tuple(cls.__dataclass_fields__))  # type: ignore[attr-defined]
        plain(self, **given)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_by_known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the target's distribution, and when to stop.

    The order is: logit rules (penalties, bias, allowed tokens, ``min_tokens``, ``bad_words``, ``rules``), temperature,
    top-k, top-p, min-p. ``temperature=0`` is greedy. Values by which other tools turn something off (``top_k=-1``, None
    for a filter or a list) are taken. Raises ParameterError (a ValueError) that names the parameter.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 (or -1): off; ties are cut by lowest token id
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits; counts prompt and output
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()  # texts or lists of token ids that the output must not contain
    rules: Sequence[LogitRule] = ()
    seed: int | None = None  # None draws one; the result reports it
    max_tokens: int | None = 256  # None: up to the model's context
    min_tokens: int = 0  # so many tokens come before EOS, a stop id or a stop string can end the answer
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    include_stop: bool = False  # the stop string, or the stop token's text, stays in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # special tokens leave no text
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0  # alternatives a token, 0 to 100; implies logprobs
    prompt_logprobs: int | None = None  # alternatives a token of the prompt; 0: the tokens alone; None: off

    def __post_init__(self) -> None:
        self._meaning_of_elsewhere()
        hint = "0 is greedy, 1 the model's own distribution"
        _in_range("temperature", self.temperature, 0.0, 100.0, hint)
        if 0 < self.temperature < MIN_TEMPERATURE:
            its = Argument("temperature", self.temperature)
            raise ParameterError(its, " is too close to 0 to divide by: use 0 (greedy) or at least 0.001")
        _integer("top_k", self.top_k, 0, 2**31 - 1, "0 turns it off")
        if _is_number(self.top_p) and self.top_p == 0:
            greedy, one = Argument("temperature", 0), Argument("top_k", 1)
            raise ParameterError(
                Argument("top_p", self.top_p), " leaves no token: for the likeliest one use ", greedy, " or ", one
            )
        _in_range("top_p", self.top_p, 0.0, 1.0, "a share; 1 turns it off", above=True)
        _in_range("min_p", self.min_p, 0.0, 1.0, "a share of the likeliest token's; 0 turns it off")
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "1 turns it off")
        _in_range("presence_penalty", self.presence_penalty, -100.0, 100.0, "0 turns it off")
        _in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "0 turns it off")
        _biases(self.logit_bias)
        if self.allowed_tokens is not None:
            _ids("allowed_tokens", self.allowed_tokens)
            if len(self.allowed_tokens) == 0:
                its = Argument("allowed_tokens")
                raise ParameterError(its, " is empty, so no token could be chosen: give at least one id, or None")
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        if not isinstance(self.rules, Sequence) or isinstance(self.rules, str):
            raise ParameterError(Argument("rules", self.rules), " is no list: give a list of logit rules")
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1, "None draws one")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "None decodes to the end of the context")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1, "0 lets the answer end at once")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = Argument("min_tokens", self.min_tokens), Argument("max_tokens", self.max_tokens)
            raise ParameterError(least, " is more than ", most, ": lower it, or raise ", Argument("max_tokens"))
        object.__setattr__(self, "stop", _stops(self.stop))
        _ids("stop_ids", self.stop_ids)
        _integer("n", self.n, 1, 1024, "it is the number of samples")
        if _is_number(self.logprobs):
            wanted = (Argument("logprobs", True), " and ", Argument("top_logprobs", int(self.logprobs)))
            raise ParameterError(Argument("logprobs", self.logprobs), " is neither True nor False: use ", *wanted)
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS, "0 reports only the chosen token")
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, "None turns it off")
        for name in ("ignore_eos", "logprobs", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ParameterError(
                    Argument(name, getattr(self, name)), " is neither True nor False: give one of them"
                )
        self._as_python()

    def _meaning_of_elsewhere(self) -> None:
        """Other tools' ways to say "off" become ours."""
        for name, off in _OFF.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, off)
        if _is_number(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

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
        unknown = changes.keys() - {f.name for f in fields(self)}
        if unknown:
            raise habits.refuse(unknown, [f.name for f in fields(self)])
        return replace(self, **changes)

    @classmethod
    def from_model(cls, source: Any, **overrides: Any) -> SamplingParams:
        """What a model's own generation_config.json recommends, with ``overrides`` on top.

        ``source``: the model's folder, that file, its content, a Hugging Face id that was downloaded, or a ModelInfo
        with such a name. Settings that have no counterpart here are logged as a warning, one line
        (``habits.recommended`` returns them). Raises ParameterError.
        """
        taken, ignored = habits.recommended(source)
        if ignored:
            log.warning("not taken from the model's generation_config: %s", ", ".join(ignored))
        return cls(**{**taken, **overrides})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Rules cannot be written: ``rules`` has the names of their classes."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("allowed_tokens", "stop", "stop_ids"):
            out[name] = None if out[name] is None else list(out[name])
        out["bad_words"] = [word if isinstance(word, str) else list(word) for word in self.bad_words]
        # JSON has neither infinity nor numbers as keys
        out["logit_bias"] = {
            str(token): bias if math.isfinite(bias) else str(bias) for token, bias in self.logit_bias.items()
        }
        out["rules"] = [type(rule).__name__ for rule in self.rules]
        return out

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], rules: Sequence[LogitRule] = ()) -> SamplingParams:
        """What ``to_dict`` gave, with the rules given again. Raises ParameterError when they are not those."""
        given = dict(value)
        named, own = list(given.pop("rules", [])), [type(rule).__name__ for rule in rules]
        if named != own:
            raise ParameterError(
                f"the parameters have rules {named}, which are not written with them, but were given {own}: "
                "give the same rules in the same order"
            )
        biases = given.get("logit_bias") or {}
        given["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
        return cls(**given, rules=rules)


_OFF: Mapping[str, Any] = {  # what None means where our own default is another value
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "bad_words": (),
    "rules": (),
    "min_tokens": 0,
    "stop": (),
    "stop_ids": (),
}


def _word(word: Any) -> str | tuple[int, ...]:
    return word if isinstance(word, str) else tuple(int(token) for token in word)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("top_k", "seed", "max_tokens", "min_tokens", "n", "top_logprobs", "prompt_logprobs"), int),
    **dict.fromkeys(("ignore_eos", "logprobs", "include_stop", "skip_special_tokens"), bool),
    **dict.fromkeys(("allowed_tokens", "stop_ids"), lambda ids: tuple(int(i) for i in ids)),
    "bad_words": lambda words: tuple(_word(word) for word in words),
    "rules": tuple,
    "logit_bias": lambda biases: {int(token): float(bias) for token, bias in biases.items()},
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _in_range(name: str, value: float, low: float, high: float, hint: str, *, above: bool = False) -> None:
    if not _is_number(value) or not (low < value <= high if above else low <= value <= high):
        least = f"above {low:g}" if above else f"at least {low:g}"
        raise ParameterError(
            Argument(name, value), f" is out of range: give a number {least} and at most {high:g} ({hint})"
        )


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def _integer(name: str, value: int, low: int, high: int, hint: str) -> None:
    if not _is_integer(value, low, high):
        raise ParameterError(
            Argument(name, value), f" is out of range: give a whole number from {low} to {high} ({hint})"
        )


def _ids(name: str, ids: Any) -> None:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, np.ndarray, Set)):
        raise ParameterError(Argument(name, ids), " is no list: give a list of token ids")
    _tokens(name, ids)


def _tokens(name: str, ids: Any) -> None:
    for token in ids:
        if not _is_integer(token, 0, 2**31 - 1):
            raise ParameterError(Argument(name), f" has {token!r}, which is no token id: give ids, not text")


def _biases(biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise ParameterError(Argument("logit_bias", biases), " is no mapping: give {token id: bias}")
    _tokens("logit_bias", biases)
    for token, bias in biases.items():
        if not _is_number(bias) or not (bias == -math.inf or abs(bias) <= MAX_BIAS):
            limits = f"give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, or -inf to forbid the token"
            raise ParameterError(Argument("logit_bias"), f" has {bias!r} for token {token}: {limits}")


def _words(words: Any) -> Any:
    """``bad_words`` as a sequence; one text is one word. Raises ParameterError."""
    name = Argument("bad_words")
    if isinstance(words, str):
        words = (words,)
    if not isinstance(words, (Sequence, np.ndarray)) or isinstance(words, bytes):
        raise ParameterError(Argument("bad_words", words), " is no list: give texts, or lists of token ids")
    for word in words:
        if isinstance(word, str):
            if not word.strip():
                raise ParameterError(name, f" has {word!r}, which is no word: remove it")
        elif isinstance(word, bytes) or not isinstance(word, (Sequence, np.ndarray)) or not len(word):
            raise ParameterError(name, f" has {word!r}: give texts, or lists of token ids that are not empty")
        else:
            _tokens("bad_words", word)
    return words


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise ParameterError(Argument("stop", stop), " is no text: give a string or a list of strings")
    if "" in stops and stop != "":
        raise ParameterError(Argument("stop"), " has an empty string, which would match everywhere: remove it")
    return tuple(text for text in stops if text)
