"""JSON schemas, random and in the shape of public suites, of which every answer ends."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

WORDS = (
    "name", "title", "status", "kind", "city", "street", "email", "phone", "price", "total", "count", "rating",
    "score", "tags", "items", "owner", "author", "created", "updated", "color", "size", "weight", "country",
    "language", "version", "path", "active", "verified", "notes", "summary", "category", "level", "parent",
)  # fmt: skip
PATTERNS = (
    r"^[A-Z]{2}-[0-9]{4}$", r"^#[0-9a-f]{6}$", r"^[a-z]{3,10}$", r"^v[0-9]\.[0-9]{1,2}$", r"^\+?[0-9]{7,11}$",
    r"^(low|medium|high)-[a-z]{2,8}$", r"^[A-Za-z]+( [A-Za-z]+){0,2}$",
)  # fmt: skip
FORMATS = ("date", "date-time", "uuid", "ipv4", "time")
Schema = dict[str, Any]


def schema(rng: Random, depth: int = 3) -> Schema:
    """An object with bounded strings, numbers and arrays, so that every answer ends; depth: of nesting."""
    root = _object(rng, depth)
    if rng.random() < 0.2:
        root["$defs"] = {"shared": _value(rng, 1)}
        root["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        root["required"].append("shared")
    return root


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 5))
    required = [name for name in names if rng.random() < 0.8] or names[:1]
    its = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}, "required": required}
    return {**its, "additionalProperties": False}


def _value(rng: Random, depth: int) -> Schema:
    kinds: list[Callable[[Random, int], Schema]] = [_string, _string, _enum, _integer, _number, _boolean]
    if depth > 0:
        kinds += [_object, _array, _any]
    return rng.choice(kinds)(rng, depth)


def _boolean(rng: Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _any(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 40}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(8, 40)}


def _enum(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        return {"const": rng.choice(["fixed value", 42, True, None])}
    values: list[Any] = rng.sample(WORDS, rng.randint(2, 5))
    return {"enum": [*values, None] if rng.random() < 0.2 else values}


def _integer(rng: Random, depth: int) -> Schema:
    low = rng.choice([0, 1, -100])
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([5, 100, 100_000])}


def _number(rng: Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 1000])}


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _value(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(1, 3)}
