"""The definition of a parameter or an option: its values, its meaning, and its names in other places.

Each is defined once: as a field of a dataclass, by ``defined``, or as a parameter of a command's function, whose
annotation has an ``option``. Checks, the command line, the server's request fields and the tables in the docs are made
from the definitions; traces and the native runtime's struct are checked against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from inspect import Parameter as Inspected
from numbers import Integral, Real
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from outpace.common.units import parse_bytes
from outpace.errors import Argument, ParameterError

TOKEN_IDS = 2**31 - 1  # the largest
MAX_BIAS = 1e30  # beyond it a float32 logit could overflow

REQUIRED: Any = Inspected.empty  # the default of what must be given
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


class Unchecked:
    """Any value."""

    json: ClassVar[Any] = Any
    range: ClassVar[str] = ""

    def checked(self, name: str, value: Any) -> Any:
        return value


UNCHECKED = Unchecked()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter, or option."""

    name: str = ""
    kind: Any = str  # the type of its values but None
    default: Any = REQUIRED  # or a function: what it returns, where None is given
    values: Values = UNCHECKED
    meaning: str  # one sentence
    none: Literal["refused", "off", "value"] = "refused"  # what None is; "off": the default
    keyword: str | None = None  # the type of the keyword, where that takes more than is kept
    # on the command line
    option: tuple[str, ...] | None = ()  # names; (): its own; None: not there
    positional: bool = False  # an argument, which is given without a name
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None  # makes a value of a text; raises ValueError with a message
    bare: str | None = None  # the value where it stands alone, with no file's name behind it
    group: str | None = None  # the heading in help ("": the first); None: the ``GROUP`` of its dataclass, or the first
    listing: tuple[str, Callable[[], Iterable[tuple[str, str]]]] | None = None  # heading, values with their meanings
    # of sampling
    stage: Stage | None = None  # where it applies
    request: str | None = None  # name in HTTP requests; None: no field of its own there
    config: str | None = None  # name in a model's generation_config.json
    aliases: tuple[str, ...] = ()  # other tools' names, beside `request` and `config`

    def checked(self, value: Any) -> Any:
        """``value`` as it is kept. Raises ParameterError."""
        if value is None and self.none != "refused":
            if self.none == "value":
                return None
            value = self.default() if callable(self.default) else self.default
        return self.values.checked(self.name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that other places have for it."""
        named = (self.request, self.config, *self.aliases)
        return tuple(dict.fromkeys(name for name in named if name is not None and name != self.name))

    def of(self, name: str, hint: Any, group: str = "") -> Parameter:
        """The same, with its name and what is known from its type and its heading."""
        union = get_origin(hint) in (UnionType, Union)
        inner = [each for each in get_args(hint) if each is not NoneType] if union else [hint]
        kind, values, none = reduce(or_, inner), self.values, self.none
        if values is UNCHECKED and get_origin(kind) is Literal:
            values = Choice(get_args(kind))
        elif values is UNCHECKED and kind is bool:
            values = Flag()
        if none == "refused" and union and NoneType in get_args(hint):
            none = "value"
        option = (f"--{name.replace('_', '-')}",) if self.option == () and not self.positional else self.option
        group = group if self.group is None else self.group
        return replace(self, name=name, kind=kind, values=values, none=none, option=option, group=group)


def option(meaning: str, *names: str, **more: Any) -> Parameter:
    """An option of a command. ``names``: where they are not its parameter's; ``more``: see Parameter."""
    return Parameter(meaning=meaning, option=names, **more)


def argument(meaning: str, metavar: str | None = None) -> Parameter:
    """An argument of a command."""
    return Parameter(meaning=meaning, positional=True, metavar=metavar)


def annotated(name: str, hint: Any, default: Any) -> Parameter:
    """The definition of a function's parameter, whose annotation has it."""
    assert get_origin(hint) is Annotated, f"{name} is annotated with neither option nor argument"
    kind, definition = get_args(hint)
    assert isinstance(definition, Parameter)
    return replace(definition, default=default).of(name, kind)


def defined(default: Any, meaning: str | Parameter, values: Values = UNCHECKED, **more: Any) -> Any:
    """A dataclass field with a parameter's definition, which ``definitions`` reads. ``meaning``: an ``option``'s, too.
    ``default``: a function is called where None is given."""
    if isinstance(meaning, Parameter):
        definition = replace(meaning, default=default, **more)
    else:
        definition = Parameter(default=default, meaning=meaning, values=values, **more)
    if default is REQUIRED:
        return field(metadata={"definition": definition})
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata={"definition": definition})
    if callable(default):
        definition, default = replace(definition, none="off"), None
    return field(default=default, metadata={"definition": definition})


@cache
def definitions(kind: Any) -> Mapping[str, Parameter]:
    """The definitions of a dataclass's fields, by name."""
    hints, group = get_type_hints(kind), getattr(kind, "GROUP", "")
    return {f.name: f.metadata["definition"].of(f.name, hints[f.name], group) for f in fields(kind) if f.metadata}


def check(options: Any) -> None:
    """Check every field of a dataclass instance, and keep its values as plain Python. Raises ParameterError that names
    the value and what is allowed."""
    kind: Any = type(options)
    for name, parameter in definitions(kind).items():
        object.__setattr__(options, name, parameter.checked(getattr(options, name)))


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_between(value: Any, low: float, high: float, *, above: bool, below: bool) -> bool:
    """Whether it is a real number from ``low`` to ``high``; ``above``, ``below``: these themselves are outside."""
    return is_number(value) and (low < value if above else low <= value) and (value < high if below else value <= high)


def _is_integer(value: Any, low: int, high: float) -> bool:
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
        if not _is_between(value, low, high, above=self.above, below=False):
            least = f"above {low:g}" if self.above else f"at least {low:g}"
            raise ParameterError(
                Argument(name, value), f" is out of range: give a number {least} and at most {high:g} ({self.hint})"
            )
        return float(value)


@dataclass(frozen=True, slots=True)
class Interval:
    """A number within an interval, such as "(0, 1]": more than 0, at most 1."""

    range: str
    remedy: str = ""
    json: ClassVar[Any] = float

    def checked(self, name: str, value: Any) -> Any:
        low, high = (float(part) for part in self.range[1:-1].split(","))
        if not _is_between(value, low, high, above=self.range[0] == "(", below=self.range[-1] == ")"):
            remedy = self.remedy or f"give a number in {self.range}"
            raise ParameterError(Argument(name, value), f" is out of range: {remedy}")
        return value if isinstance(value, (int, float)) else float(value)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number. ``off``: a value by which other tools say ``low``."""

    low: int
    high: float = math.inf
    hint: str = ""
    off: int | None = None
    remedy: str = ""
    json: ClassVar[Any] = int

    @property
    def range(self) -> str:
        if self.high == math.inf:
            return f"{self.low} or more"
        powers: dict[float, str] = {2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1"}
        return f"{self.low} to {powers.get(self.high, self.high)}"

    def checked(self, name: str, value: Any) -> int:
        if self.off is not None and is_number(value) and value == self.off:
            return self.low
        if not _is_integer(value, self.low, self.high):
            limits = f"give a whole number from {self.low} to {self.high}{self.hint and f' ({self.hint})'}"
            raise ParameterError(Argument(name, value), f" is out of range: {self.remedy or limits}")
        return int(value)


class Amount(Integer):
    """Bytes, or a text such as "2GiB"."""

    def checked(self, name: str, value: Any) -> int:
        try:
            size = parse_bytes(value)
        except ParameterError as error:
            raise ParameterError(Argument(name), ": ", error) from error
        return super().checked(name, size)


class Flag:
    """True or False."""

    json: ClassVar[Any] = bool
    range: ClassVar[str] = "true, false"

    def checked(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool) and getattr(getattr(value, "dtype", None), "kind", "") != "b":
            raise ParameterError(Argument(name, value), " is neither True nor False: give one of them")
        return bool(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some texts."""

    known: tuple[str, ...]
    word: str = "not known"
    json: ClassVar[Any] = str

    @property
    def range(self) -> str:
        return ", ".join(self.known)

    def checked(self, name: str, value: Any) -> Any:
        if value not in self.known:
            raise ParameterError(Argument(name, value), f" is {self.word}: use one of {self.range}")
        return value


class Text:
    """A text."""

    json: ClassVar[Any] = str
    range: ClassVar[str] = "text"

    def checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ParameterError(Argument(name, value), " is no text: give one, or leave it out")
        return value


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


@dataclass(frozen=True, slots=True)
class Each:
    """Texts, of which each is ``right``; none: None or an empty list."""

    right: Callable[[str], bool]
    remedy: str
    json: ClassVar[Any] = list[str]
    range: ClassVar[str] = "texts"

    def checked(self, name: str, texts: Any) -> tuple[str, ...]:
        for text in texts or ():
            if not self.right(text):
                raise ParameterError(Argument(name, text), self.remedy)
        return tuple(texts or ())


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
