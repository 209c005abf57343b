"""Typed requests and answers: their pydantic bases, and how a request that is none is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from outpace.server.errors import APIError, cut
from outpace.server.fields import FIELDS, OF_CONTENT, TAKEN

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", bound="Body")

Items = Annotated[list[T], Field(fail_fast=True)]  # one error a list: a list of errors costs far more than its request


class Unknown:
    """What a server does about fields that it does not know. ``refused``: they are errors; else they are ignored, and
    each is logged once."""

    def __init__(self, *, refused: bool = False) -> None:
        self.refused = refused
        self._logged: set[str] = set()

    def ignore(self, place: str, name: str) -> None:
        """``place``: what has the field."""
        field = cut(f"{place}.{name}", 100)
        if field not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(field)
            log.warning("a field is unknown and ignored", extra={"fields": {"field": field}})


class Body(BaseModel):
    """A request, or a part of one. Nothing is coerced (``"1"`` is no number). Of the fields that are not known, null
    ones count for nothing; those that would change the answer (``FIELDS``) and misspelt ones are refused by name; the
    others are ignored, or refused, as the ``Unknown`` in the validation's context says."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    bulk: ClassVar[int] = 1  # so many times as many values as other requests may have
    own: ClassVar[bool] = False  # no other server has such an object: a field that it does not know is a mistake

    @model_validator(mode="after")
    def _knows(self, info: ValidationInfo) -> Self:
        extra = self.__pydantic_extra__
        given = [name for name, value in extra.items() if value is not None] if extra else []
        if len(given) > _MOST_UNKNOWN:
            why = f"one of {len(given)} unknown fields: leave them out"
            raise PydanticCustomError("unknown_field", "{why}", {"name": given[0], "why": why})
        for name in given:
            self._check_unknown(name, info.context)
        if extra:
            extra.clear()  # nobody reads them, templates included
        return self

    def _check_unknown(self, name: str, unknown: Unknown | None) -> None:
        kind = type(self)
        why = None
        if name in _refused(kind):
            why = FIELDS[name].why
        elif (meant := _meant(kind, name)) is not None and getattr(self, meant) is None:
            why = f"did you mean {kind.model_fields[meant].alias or meant}?"
        elif self.own or (unknown is not None and unknown.refused):
            why = "it is unknown: check its spelling, or leave it out"
        if why is not None:
            raise PydanticCustomError("unknown_field", "{why}", {"name": name, "why": why})
        if unknown is not None:
            unknown.ignore(kind.__name__, name)


@cache
def _refused(kind: type[Body]) -> frozenset[str]:
    """Names of fields that would change the answer to a request, or the meaning of a part of one."""
    if "model" in kind.model_fields or "temperature" in kind.model_fields:
        return frozenset(name for name, other in FIELDS.items() if other.takes is None)
    return OF_CONTENT


def _meant(kind: type[Body], name: str) -> str | None:
    """The field that ``name`` is a misspelling of, but for capitals and punctuation by one letter."""
    plain = _plain(name)
    if not _SHORTEST <= len(plain) <= _LONGEST:
        return None
    spellings = _spellings(kind)
    return next((spellings[text] for text in _without_one(plain) if text in spellings), None)


@cache
def _spellings(kind: type[Body]) -> dict[str, str]:
    """The fields, by their names and by these without one letter."""
    names = {name: _plain(field.alias or name) for name, field in kind.model_fields.items()}
    return {text: name for name, plain in names.items() if len(plain) >= _SHORTEST for text in _without_one(plain)}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _without_one(text: str) -> list[str]:
    return [text, *(text[:i] + text[i + 1 :] for i in range(len(text)))]


_SHORTEST, _LONGEST = 5, 28  # letters of names that are compared
_MOST_UNKNOWN = 64  # of one object
_MOST_LOGGED = 256


def only(*kinds: str) -> BeforeValidator:
    """Of a part's ``type``: others, which are of images, sounds or files, are refused by name."""

    def checked(value: Any) -> Any:
        if isinstance(value, str) and value not in kinds:
            raise ValueError(f"{cut(value, 64)!r} is not supported: this server reads text alone; give {kinds[0]}")
        return value

    return BeforeValidator(checked)


class Answer(BaseModel):
    """An answer, or a part of one. What was not given at construction is left out of the JSON."""

    model_config = ConfigDict(extra="forbid")

    def to_json(self) -> bytes:
        """The JSON, in UTF-8."""
        return self.model_dump_json(exclude_unset=True, by_alias=True).encode()

    def to_dict(self) -> dict[str, Any]:
        """What the JSON says."""
        return self.model_dump(exclude_unset=True, by_alias=True)


def parsed(kind: type[M], body: bytes, unknown: Unknown | None = None) -> M:
    """``body`` as a ``kind``. ``unknown``: what becomes of fields that are not known. Raises APIError (400) that names
    the first thing wrong."""
    try:
        return kind.model_validate_json(body, context=unknown)
    except ValidationError as error:
        raise refusal(kind, error) from None


def made(kind: type[M], fields: Mapping[str, Any]) -> M:
    """A ``kind`` of those fields that are not None. Raises APIError (400) that names the first thing wrong."""
    try:
        return kind(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise refusal(kind, error) from None


def refusal(request: type[Body], error: ValidationError) -> APIError:
    """What a client of a ``request`` reads of ``error``: one thing that is wrong, by name."""
    if error.error_count() > _MOST_ERRORS:  # of a mapping's values; each would become an object
        return APIError(400, f"the body has {error.error_count()} mistakes: correct it", code="invalid_value")
    found = error.errors(include_url=False, include_input=False)
    # of a union's branches, the one that went furthest is what was meant
    first = min(found, key=lambda each: (each["type"] != "unknown_field", -len(each["loc"])))
    kind, where = first["type"], first["loc"]
    if kind == "unknown_field":
        where = (*where, first["ctx"]["name"])
    place = [str(part) for part in where[:-1] if not _internal(part)]
    if where and (kind == "unknown_field" or not _internal(where[-1])):  # an unknown name is the client's own
        place.append(str(where[-1]))
    if not place:
        return APIError(400, f"the body is not a JSON object of this kind: {first['msg']}", code="invalid_json")
    param = ".".join(place)
    why = first["ctx"]["why"] if kind == "unknown_field" else _why(request, place, first)
    if why is not None:
        return APIError(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")
    if kind == "missing":
        return APIError(400, f"{param} is missing: give it", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return APIError(400, f"{param}: {message}", param=param, code="invalid_value")


def _why(request: type[Body], place: Sequence[str], wrong: Mapping[str, Any]) -> str | None:
    """Why a value is not taken that would change the answer; None: the field is one of the request's own, or of an
    object in it, with a wrong value."""
    *around, name = place
    kind: type[Body] | None = request
    for part in around:
        kind = None if kind is None else _object(kind, part)
    field = None if kind is None else kind.model_fields.get(name)
    taken = field is not None and name in TAKEN and field.annotation == TAKEN[name][0]
    nothing = name in FIELDS and wrong.get("ctx", {}).get("max_length") == 0
    return FIELDS[name].why if taken or nothing else None


def _object(kind: type[Body], name: str) -> type[Body] | None:
    """What a field holds, where that is an object."""
    field = kind.model_fields.get(name)
    held = () if field is None else get_args(field.annotation)
    return next((each for each in held if isinstance(each, type) and issubclass(each, Body)), None)


def _internal(part: str | int) -> bool:
    """Whether pydantic put it there: the name of a branch of a union, not of a field."""
    return isinstance(part, str) and (part[:1].isupper() or "[" in part or part in _BRANCHES)


_MOST_ERRORS = 10_000
_BRANCHES = {"str", "int", "float", "bool", "dict", "constrained-str"}
