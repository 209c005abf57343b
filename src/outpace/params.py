"""What a request may ask for: ``SamplingParams``, every parameter defined once, and the seam for logit rules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, runtime_checkable

from outpace.common import habits
from outpace.common.parameter import (
    Biases,
    Integer,
    Number,
    Parameter,
    Rules,
    Texts,
    TokenIds,
    Words,
    check,
    defined,
    definitions,
    is_number,
)
from outpace.errors import Argument, ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from outpace.common.arrays import F32, I32, U32

log = logging.getLogger(__name__)

Acceptance = Literal["coupled", "rejection"]
ACCEPTANCES: tuple[Acceptance, ...] = ("coupled", "rejection")
Message = Mapping[str, Any]
Prompt: TypeAlias = "str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[Message]"

MIN_TEMPERATURE = 1e-3


@runtime_checkable
class LogitRule(Protocol):
    """A change to the logits that depends on the tokens so far. A pure function of its arguments: it sees drafts that
    may never be committed. What it raises ends its request, as a RuleError.

    A rule may have three methods more (``GrammarRule``). ``mask(state)`` gives the tokens it allows as bits, or None;
    where it gives bits, they are all that the rule does there: ``apply`` is not called, no logits are copied, and
    drafted nodes that it forbids are dropped before the forward. ``allows(state, token)`` answers for one token.
    ``forced(state)`` gives tokens that must follow.
    """

    def start(self, prompt: I32) -> Any:
        """The state after ``prompt`` int32 [P]."""

    def advance(self, state: Any, token: int) -> Any:
        """The state after ``state`` and one output ``token`` (an id); ``state`` itself is not changed."""

    def apply(self, state: Any, logits: F32) -> None:
        """Change float32 ``logits`` [V] in place, given ``state``. -inf forbids a token."""


class GrammarRule(LogitRule, Protocol):
    """A rule with all methods that a rule may have. ``allows`` needs ``mask``; nothing needs to inherit from here."""

    def mask(self, state: Any) -> U32 | None:
        """What ``state`` allows, uint32 [ceil(V / 32)]: token t if bit t % 32 of word t // 32 is set. Not to be
        changed.

        None: there is no mask in this state, and ``apply`` is called.
        """

    def allows(self, state: Any, token: int) -> bool:
        """Whether ``mask(state)``, which is bits in every state, has ``token``; worth having where that costs less.

        The mask is then asked for only after a token that the target would choose without it turned out forbidden.
        """

    def forced(self, state: Any) -> Sequence[int]:
        """Token ids, in order, that follow ``state`` since the text must go on so; as many as are known, perhaps none.

        They are drafted, which costs nothing, and never imposed: under the mask the target may choose others.
        """


Rule = LogitRule | Callable[[Any, Any], Any]  # a function of ids and logits, a transformers LogitsProcessor

T = TypeVar("T")


def _by_known_names(cls: type[T]) -> type[T]:
    """Let a parameter that there is none of be an error that says how it is spelled here, not a TypeError."""
    plain: Callable[..., None] = cls.__init__
    known = tuple(cls.__annotations__)

    @wraps(plain)
    def __init__(self: Any, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise ParameterError(f"SamplingParams takes its parameters by name: give {unnamed[0]!r} one")
        check_keywords(given, known, "SamplingParams")
        plain(self, **given)

    type.__setattr__(cls, "__init__", __init__)
    return cls


_WHOLE = 2**31 - 1
_OFF_AT_0 = Number(-100, 100, "0 turns it off")
_TOP = Integer(0, 100, "0 reports only the chosen token")


@_by_known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of the target's distribution, and when to stop.

    The order is: logit rules (penalties, bias, allowed tokens, ``min_tokens``, ``bad_words``,
    ``no_repeat_ngram_size``, ``rules``), top-n-sigma, temperature, top-k, top-p, min-p. ``temperature=0`` is greedy.
    Values by which other tools turn something off (``top_k=-1``, None for a filter or a list) are taken. Raises
    ParameterError (a ValueError) that names the parameter.
    """

    temperature: float = defined(
        0.0, "0 is greedy, 1 the model's own distribution.",
        Number(0, 100, "0 is greedy, 1 the model's own distribution"),
        stage="temperature", option=("--temperature", "-T"), request="temperature", config="temperature",
        aliases=("temp", "T"),
    )  # fmt: skip
    top_n_sigma: float = defined(
        0.0, "Keep tokens whose logit is at most this many standard deviations below the largest. 0: off.",
        Number(0, 100, "in standard deviations of the logits; 0 turns it off"), stage="filter", none="off",
        request="top_n_sigma", config="top_n_sigma", aliases=("nsigma", "top_nsigma"),
    )  # fmt: skip
    top_k: int = defined(
        0, "Keep the k likeliest tokens; ties are cut by lowest token id. 0: off.",
        Integer(0, _WHOLE, "0 turns it off", off=-1), stage="filter", none="off", request="top_k", config="top_k",
    )  # fmt: skip
    top_p: float = defined(
        1.0, "Keep the likeliest tokens whose probabilities reach this sum. 1: off.",
        Number(0, 1, "a share; 1 turns it off", above=True), stage="filter", none="off",
        request="top_p", config="top_p",
    )  # fmt: skip
    min_p: float = defined(
        0.0, "Drop tokens less likely than this share of the likeliest. 0: off.",
        Number(0, 1, "a share of the likeliest token's; 0 turns it off"), stage="filter", none="off",
        request="min_p", config="min_p",
    )  # fmt: skip
    repetition_penalty: float = defined(
        1.0, "Divides positive and multiplies negative logits of tokens in prompt and output. 1: off.",
        Number(0.01, 100, "1 turns it off"), stage="logits", none="off", request="repetition_penalty",
        config="repetition_penalty", aliases=("repeat_penalty", "penalty_repeat"),
    )  # fmt: skip
    presence_penalty: float = defined(
        0.0, "Taken from the logits of tokens in the output. 0: off.", _OFF_AT_0, stage="logits", none="off",
        request="presence_penalty", aliases=("penalty_present",),
    )  # fmt: skip
    frequency_penalty: float = defined(
        0.0, "Taken from a token's logit for each time it is in the output. 0: off.", _OFF_AT_0, stage="logits",
        none="off", request="frequency_penalty", aliases=("penalty_freq",),
    )  # fmt: skip
    logit_bias: Mapping[int, float] = defined(
        {}, "Added to tokens' logits; -inf forbids.", Biases(), stage="logits", none="off", request="logit_bias"
    )
    allowed_tokens: Sequence[int] | None = defined(
        None, "No other token is chosen.", TokenIds(may_be_empty=False), stage="logits", option=None,
        request="allowed_token_ids", aliases=("whitelist",),
    )  # fmt: skip
    bad_words: Sequence[str | Sequence[int]] = defined(
        (), "Texts, or token ids, that the output must not contain.", Words(), stage="logits", none="off",
        option=("--bad-word",), request="bad_words", config="bad_words_ids",
        aliases=("banned_tokens", "banned_strings"),
    )  # fmt: skip
    no_repeat_ngram_size: int = defined(
        0, "No run of so many tokens comes twice in prompt and output. 0: off.",
        Integer(0, _WHOLE, "0 turns it off"), stage="logits", none="off", request="no_repeat_ngram_size",
        config="no_repeat_ngram_size", aliases=("no_repeat_ngram",),
    )  # fmt: skip
    rules: Sequence[Rule] = defined(
        (), "Changes of the logits, in order.", Rules(), stage="logits", none="off", option=None
    )
    seed: int | None = defined(
        None, "The same seed gives the same tokens. None draws one, which the result reports.",
        Integer(0, 2**64 - 1, "None draws one"), stage="noise", request="seed", aliases=("random_seed", "generator"),
    )  # fmt: skip
    max_tokens: int | None = defined(
        256, "Most tokens to write. None: up to the model's context.",
        Integer(1, _WHOLE, "None decodes to the end of the context"), stage="end", option=("--max-tokens", "-n"),
        config="max_new_tokens", aliases=("max_completion_tokens", "max_gen_len", "n_predict", "num_predict"),
    )  # fmt: skip
    min_tokens: int = defined(
        0, "This many tokens come before EOS, a stop id or a stop string can end the answer.",
        Integer(0, _WHOLE, "0 lets the answer end at once"), stage="end", none="off",
        request="min_tokens", config="min_new_tokens",
    )  # fmt: skip
    stop: str | Sequence[str] = defined(
        (), "The answer ends before these texts.", Texts(), stage="end", none="off",
        request="stop", config="stop_strings", aliases=("stop_sequences", "stop_words"),
    )  # fmt: skip
    stop_ids: Sequence[int] = defined(
        (), "The answer ends after these tokens, as it does after the model's own EOS.", TokenIds(), stage="end",
        none="off", option=("--stop-id",), request="stop_token_ids", aliases=("eos_token_id",),
    )  # fmt: skip
    include_stop: bool = defined(
        False, "What stopped the answer, a text or a token, stays in its text.", stage="text",
        request="include_stop_str_in_output", aliases=("no_stop_trim",),
    )  # fmt: skip
    ignore_eos: bool = defined(False, "The model's EOS does not end the answer.", stage="end", request="ignore_eos")
    skip_special_tokens: bool = defined(
        True, "Leave special tokens out of the text (--keep-special: keep them).", stage="text",
        option=("--keep-special",),
        request="skip_special_tokens", aliases=("skip_special",),
    )  # fmt: skip
    n: int = defined(
        1, "How many samples are drawn.", Integer(1, 1024, "it is the number of samples"), stage="answer", option=None,
        request="n", config="num_return_sequences", aliases=("best_of", "num_samples"),
    )  # fmt: skip
    logprobs: bool = defined(
        False, "Each token's log-probability, before rules and temperature.", stage="answer", option=None
    )
    top_logprobs: int = defined(
        0, "So many alternatives for each token; implies logprobs.", _TOP, stage="answer", option=None
    )
    prompt_logprobs: int | None = defined(
        None, "The same of the prompt's tokens. 0: they alone. None: off.", _TOP, stage="answer", option=None
    )

    def __post_init__(self) -> None:
        self._refuse_misunderstandings()
        check(self)
        if 0 < self.temperature < MIN_TEMPERATURE:
            given = Argument("temperature", self.temperature)
            raise ParameterError(given, " is too close to 0 to divide by: use 0 (greedy) or at least 0.001")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = Argument("min_tokens", self.min_tokens), Argument("max_tokens", self.max_tokens)
            raise ParameterError(least, " is more than ", most, ": lower it, or raise ", Argument("max_tokens"))

    def _refuse_misunderstandings(self) -> None:
        """Values with a meaning in other tools and another spelling here."""
        if is_number(self.top_p) and self.top_p == 0:
            greedy, one = Argument("temperature", 0), Argument("top_k", 1)
            raise ParameterError(
                Argument("top_p", self.top_p), " leaves no token: for the likeliest one use ", greedy, " or ", one
            )
        if is_number(self.logprobs):
            wanted = (Argument("logprobs", True), " and ", Argument("top_logprobs", int(self.logprobs)))
            raise ParameterError(Argument("logprobs", self.logprobs), " is neither True nor False: use ", *wanted)

    def __repr__(self) -> str:
        values = {
            name: (getattr(self, name), parameter.checked(parameter.default)) for name, parameter in PARAMETERS.items()
        }
        return (
            f"SamplingParams({', '.join(f'{name}={own!r}' for name, (own, usual) in values.items() if own != usual)})"
        )

    @property
    def greedy(self) -> bool:
        """Whether every choice is the likeliest token."""
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether a filter may remove tokens. It depends on all of the logits, so on which tokens are allowed, too."""
        return any(getattr(self, name) != PARAMETERS[name].default for name in FILTERS)

    @property
    def wants_logprobs(self) -> bool:
        """Whether results have log-probabilities of their tokens."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return tuple(self.stop)

    def with_(self, **changes: Unpack[SamplingKeywords]) -> SamplingParams:
        """A copy with ``changes``, fields by name, validated anew. Raises ParameterError."""
        check_keywords(changes, PARAMETERS, "SamplingParams")
        return replace(self, **changes)

    @classmethod
    def from_model(cls, source: Any, **overrides: Unpack[SamplingKeywords]) -> SamplingParams:
        """What a model's own generation_config.json recommends, with ``overrides`` on top.

        ``source``: the model's folder, that file, its content, a Hugging Face id that was downloaded, or a ModelInfo
        with such a name. Settings that have no counterpart here are logged, one line. Raises ParameterError.
        """
        taken, ignored = habits.recommended(source, PARAMETERS)
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
    def from_dict(cls, value: Mapping[str, Any], rules: Sequence[Rule] = ()) -> SamplingParams:
        """The parameters of ``value``, which ``to_dict`` gave, with the ``rules`` given again. Raises ParameterError
        when they are not those."""
        given = dict(value)
        named, own = list(given.pop("rules", [])), [type(rule).__name__ for rule in rules]
        if named != own:
            raise ParameterError(
                f"the parameters have rules {named}, which are not written with them, but were given {own}: "
                "give the same rules in the same order"
            )
        biases = dict(given.get("logit_bias") or {})
        given["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
        return cls(**given, rules=rules)


PARAMETERS: Mapping[str, Parameter] = definitions(SamplingParams)
SamplingParams.__doc__ = "\n".join(
    (SamplingParams.__doc__ or "", *(f"    ``{name}``: {known.meaning}" for name, known in PARAMETERS.items()))
)


class SamplingKeywords(TypedDict, total=False):
    """Fields of ``SamplingParams`` as keywords. Written by scripts/tables.py."""

    temperature: float
    top_n_sigma: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_tokens: Sequence[int] | None
    bad_words: Sequence[str | Sequence[int]]
    no_repeat_ngram_size: int
    rules: Sequence[Rule]
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    skip_special_tokens: bool
    n: int
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int | None


FILTERS = tuple(name for name, parameter in PARAMETERS.items() if parameter.stage == "filter")


def check_keywords(given: Iterable[str], takes: Collection[str], call: str) -> None:
    """Raise ParameterError for the first of ``given`` that ``call`` does not take, with what stands for it here."""
    unknown = sorted(set(given) - set(takes))
    if unknown:
        raise habits.refusal(unknown[0], takes, call, PARAMETERS)
