"""How a function becomes a command: options from dataclasses, logging, and Ctrl-C as an error like any other."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])


class Interrupted(Exception):
    """Ctrl-C ended a command; the message says what was kept."""


class ReaderLeft(Exception):
    """Whoever read our output has gone, as ``head`` does."""


def flatten(function: F) -> F:
    """Let every parameter whose type is a dataclass appear as that dataclass's fields."""
    hints = get_type_hints(function, include_extras=True)
    parameters, groups = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if not (isinstance(hint, type) and is_dataclass(hint)):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        own = get_type_hints(hint, include_extras=True)
        groups[name] = hint, [f.name for f in fields(hint)]
        for f in fields(hint):
            default = f.default if f.default is not MISSING else None
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=own[f.name])
            )

    @wraps(function)
    def command(**given: Any) -> Any:
        for name, (kind, members) in groups.items():
            given[name] = kind(**{member: given.pop(member) for member in members})
        common = given.get("common")
        verbose = common is not None and common.verbose
        if verbose or sys.stderr.isatty():  # a person waits: what takes a while is said
            logging.basicConfig(format="%(message)s", force=True)
            logging.getLogger("outpace" if verbose else "outpace.control.cost").setLevel(logging.INFO)
        try:
            return function(**given)
        except KeyboardInterrupt as error:  # typer would end on its own terms, and without a word
            raise Interrupted("interrupted") from error
        except BrokenPipeError as error:
            raise ReaderLeft from error

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command  # type: ignore[return-value]
