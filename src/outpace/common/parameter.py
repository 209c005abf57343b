"""The definition of a sampling parameter: its values, its meaning, and its names in other places.

``outpace.params`` defines every parameter once, by these. The command line's options, the server's request fields,
the table in the docs, traces and the native runtime's struct are made from the definitions or checked against them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Protocol

from outpace.errors import Argument, ParameterError

TOKEN_IDS = 2**31 - 1  # the largest
MAX_BIAS = 1e30  # beyond it a float32 logit could overflow

Stage = Literal["logits", "temperature", "filter", "noise", "end", "text", "answer"]


class Values(Protocol):
    """The values that a parameter takes."""

    @property
    def json(self) -> Any:
        """The Python type of a value that came as JSON."""

    @property
    def range(self) -> str:
        """The values in a few words, for a table."""

    def checked(self, name: str, value: Any) -> Any:
        """``value`` as plain Python (numpy's numbers round to their own width). Raises ParameterError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter."""

    name: str = ""
    default: Any = None
    values: Values
    meaning: str  # one sentence
    stage: Stage  # where it applies
    none: Literal["refused", "off", "value"] = "refused"  # what None is; "off": the default, which changes nothing
    option: tuple[str, ...] = ()  # names on the command line; (): no option of its own there
    request: str | None = None  # name in HTTP requests; None: no field of its own there
    config: str | None = None  # name in a model's generation_config.json
    aliases: tuple[str, ...] = ()  # other tools' names, beside `request` and `config`

    def checked(self, value: Any) -> Any:
        """``value`` as it is kept. Raises ParameterError."""
        if value is None and self.none != "refused":
            if self.none == "value":
                return None
            value = self.default
        return self.values.checked(self.name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that other places have for it."""
        named = (self.request, self.config, *self.aliases)
        return tuple(dict.fromkeys(name for name in named if name is not None and name != self.name))


def defined(default: Any, values: Values, stage: Stage, meaning: str, **more: Any) -> Any:
    """A dataclass field with a parameter's definition, which ``definitions`` reads."""
    definition = Parameter(default=default, values=values, stage=stage, meaning=meaning, **more)
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata={"definition": definition})
    return field(default=default, metadata={"definition": definition})


def definitions(kind: type[Any]) -> dict[str, Parameter]:
    """The definitions of a dataclass's fields, by name."""
    return {f.name: replace(f.metadata["definition"], name=f.name) for f in fields(kind)}


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and bool(low <= int(value) <= high)


def _is_list(value: Any) -> bool:
    return isinstance(value, (Sequence, Set)) or hasattr(value, "__array__")


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    ids = tuple(ids)
    for token in ids:
        if not _is_integer(token, 0, TOKEN_IDS):
            raise ParameterError(Argument(name), f" has {token!r}, which is no token id: give whole numbers from 0 on")
    return tuple(int(token) for token in ids)


@dataclass(frozen=True, slots=True)
class Number:
    """A real number from ``low`` to ``high``; ``above``: ``low`` itself is no value."""

    low: float
    high: float
    hint: str
    above: bool = False
    json: ClassVar[Any] = float

    @property
    def range(self) -> str:
        return f"{'above ' if self.above else ''}{self.low:g} to {self.high:g}"

    def checked(self, name: str, value: Any) -> float:
        low, high = self.low, self.high
        if not is_number(value) or not (low < value <= high if self.above else low <= value <= high):
            least = f"above {low:g}" if self.above else f"at least {low:g}"
            raise ParameterError(
                Argument(name, value), f" is out of range: give a number {least} and at most {high:g} ({self.hint})"
            )
        return float(value)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number. ``off``: a value by which other tools say ``low``."""

    low: int
    high: int
    hint: str
    off: int | None = None
    json: ClassVar[Any] = int

    @property
    def range(self) -> str:
        powers = {2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1"}
        return f"{self.low} to {powers.get(self.high, self.high)}"

    def checked(self, name: str, value: Any) -> int:
        if self.off is not None and is_number(value) and value == self.off:
            return self.low
        if not _is_integer(value, self.low, self.high):
            raise ParameterError(
                Argument(name, value),
                f" is out of range: give a whole number from {self.low} to {self.high} ({self.hint})",
            )
        return int(value)


class Flag:
    """True or False."""

    json: ClassVar[Any] = bool
    range: ClassVar[str] = "true, false"

    def checked(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool) and getattr(getattr(value, "dtype", None), "kind", "") != "b":
            raise ParameterError(Argument(name, value), " is neither True nor False: give one of them")
        return bool(value)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids."""

    may_be_empty: bool = True
    json: ClassVar[Any] = list[int]
    range: ClassVar[str] = "token ids"

    def checked(self, name: str, ids: Any) -> tuple[int, ...]:
        if isinstance(ids, (str, bytes)) or not _is_list(ids):
            raise ParameterError(Argument(name, ids), " is no list: give a list of token ids")
        checked = _token_ids(name, ids)
        if not checked and not self.may_be_empty:
            raise ParameterError(
                Argument(name), " is empty, so no token could be chosen: give at least one id, or None"
            )
        return checked


class Biases:
    """Numbers by token id."""

    json: ClassVar[Any] = dict[str, float]
    range: ClassVar[str] = "{token id: number}"

    def checked(self, name: str, biases: Any) -> dict[int, float]:
        if not isinstance(biases, Mapping):
            raise ParameterError(Argument(name, biases), " is no mapping: give {token id: bias}")
        _token_ids(name, biases)
        for token, bias in biases.items():
            if not is_number(bias) or not (bias == -math.inf or abs(bias) <= MAX_BIAS):
                limits = f"give a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, or -inf to forbid the token"
                raise ParameterError(Argument(name), f" has {bias!r} for token {token}: {limits}")
        return {int(token): float(bias) for token, bias in biases.items()}


class Texts:
    """A text, or a list of texts."""

    json: ClassVar[Any] = str | list[str]
    range: ClassVar[str] = "texts"

    def checked(self, name: str, texts: Any) -> tuple[str, ...]:
        listed = (texts,) if isinstance(texts, str) else texts
        if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
            raise ParameterError(Argument(name, texts), " is no text: give a string or a list of strings")
        if "" in listed and texts != "":
            raise ParameterError(Argument(name), " has an empty string, which would match everywhere: remove it")
        _check_unicode(name, listed)
        return tuple(text for text in listed if text)


def _check_unicode(name: str, texts: Sequence[str]) -> None:
    """Raise ParameterError for half a surrogate pair, which no answer has."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            why = f" has {text!r}, which is not valid Unicode: remove it"
            raise ParameterError(Argument(name), why) from error


class Words:
    """Texts, or lists of token ids; one text is one word."""

    json: ClassVar[Any] = list[str]
    range: ClassVar[str] = "texts, lists of token ids"

    def checked(self, name: str, words: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(words, str):
            words = (words,)
        if not _is_list(words) or isinstance(words, (bytes, Set)):
            raise ParameterError(Argument(name, words), " is no list: give texts, or lists of token ids")
        return tuple(self._word(name, word) for word in words)

    @staticmethod
    def _word(name: str, word: Any) -> str | tuple[int, ...]:
        if isinstance(word, str):
            if not word.strip():
                raise ParameterError(Argument(name), f" has {word!r}, which is no word: remove it")
            _check_unicode(name, [word])
            return word
        if isinstance(word, (bytes, Set)) or not _is_list(word) or not len(word):
            raise ParameterError(Argument(name), f" has {word!r}: give texts, or lists of token ids that are not empty")
        return _token_ids(name, word)


class Rules:
    """Logit rules."""

    json: ClassVar[Any] = None  # a rule is code
    range: ClassVar[str] = "LogitRules"

    def checked(self, name: str, rules: Any) -> tuple[Any, ...]:
        if not isinstance(rules, Sequence) or isinstance(rules, str):
            raise ParameterError(Argument(name, rules), " is no list: give a list of logit rules")
        return tuple(rules)
