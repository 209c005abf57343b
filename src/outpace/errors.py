"""Errors a user can meet. Each message names the value that is wrong and the remedy.

A message has two audiences: a caller's arguments are ``max_tokens=0`` in Python and ``--max-tokens 0`` on the
command line. So a message is made of parts, in which an ``Argument`` stands for one, and is spelled when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Argument:
    """A parameter in a message, by its ``name`` in Python, perhaps with a ``value``."""

    name: str
    value: Any = ...  # ...: none; a singleton that can be pickled

    @property
    def has_value(self) -> bool:
        """Whether the message has the value, too."""
        return self.value is not ...

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}" if self.has_value else self.name

    def __reduce__(self) -> Any:
        """Pickled and copied with a plain value, or with its ``repr``: it may be anything that a caller gave."""
        plain = self.value is None or isinstance(self.value, (bool, int, float, str, type(...)))
        return type(self), (self.name, self.value if plain else Spelled(repr(self.value)))


@dataclass(frozen=True, slots=True)
class Spelled:
    """A value of which only ``text``, its ``repr``, is kept."""

    text: str

    def __repr__(self) -> str:
        return self.text


class OutpaceError(Exception):
    """Base of every error that Outpace raises on purpose.

    ``parts`` of the message: texts, ``Argument``s, and errors whose own message is part of this one.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)

    def __str__(self) -> str:
        return self.spelled(str)

    def spelled(self, spell: Callable[[Argument], str]) -> str:
        """The message, with every argument as ``spell`` writes it. ``str(error)`` writes Python."""

        def text(part: Any) -> str:
            if isinstance(part, Argument):
                return spell(part)
            return part.spelled(spell) if isinstance(part, OutpaceError) else str(part)

        return "".join(text(part) for part in self.args)

    @property
    def parameter(self) -> str | None:
        """The parameter that the message names first, if it names one."""
        for part in self.args:
            found = part.name if isinstance(part, Argument) else getattr(part, "parameter", None)
            if found is not None:
                return str(found)
        return None


class ParameterError(OutpaceError, ValueError):
    """A parameter, option or prompt is out of range or cannot be honoured."""


class GrammarError(ParameterError):
    """A JSON schema, regular expression or grammar is malformed, has no text, or asks for what is not offered."""


class ModelError(OutpaceError):
    """A model cannot be found, read, or served exactly."""


class DrafterError(OutpaceError, ValueError):
    """A drafter spec is malformed, or the drafter does not fit the target."""


class MemoryLimitError(OutpaceError):
    """A request can never fit into the KV memory it was given."""


class NoTokenAllowedError(OutpaceError):
    """The logit rules of a request forbid every token, so nothing can be chosen."""

    def __init__(self, *parts: Any) -> None:
        names = (Argument("allowed_tokens"), ", ", Argument("logit_bias"), ", ", Argument("bad_words"))
        super().__init__(*(parts or ("every token is forbidden: loosen ", *names, " or the grammar")))


class NotFiniteError(OutpaceError, FloatingPointError):
    """The model's logits are NaN or infinite, so nothing can be chosen."""

    def __init__(self, *parts: Any) -> None:
        remedy = (Argument("dtype", "float32"), ", or check the weights")
        super().__init__(*(parts or ("the model produced NaN or infinite logits: try ", *remedy)))


class DataError(OutpaceError, ValueError):
    """Training data cannot be read, written, or used with this target."""


class TrainingError(OutpaceError):
    """A training cannot go on: its numbers are not finite, or its snapshot belongs to another one."""


class MissingExtraError(OutpaceError, ImportError):
    """A part of Outpace needs packages that were not installed with it."""


class RuleError(OutpaceError):
    """A logit rule, or a foreign logits processor, raised or returned nonsense: its request ends, and no other."""


class ComplexityError(RuleError):
    """A grammar became too complex while it ran: its request ends, and no other."""
