"""JSON schemas in the keywords that a grammar can express: what means the same, and what is left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from outpace.text.schemas import BY_NAME, resolved

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_QUANTIFIER = re.compile(r"([*+?]|\{\d+(,\d*)?\})[?+]?")
_BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_ENCODED = ("contentEncoding", "contentMediaType")
_DATA = frozenset(("const", "default", "enum", "example", "examples"))  # keywords whose values are no schemas
_NAMED_ALONE = frozenset(("type", "title", "description"))  # keywords that say nothing of a text


def expressed(schema: Any) -> Any:
    """``schema`` with names that ``propertyNames`` lists, or their pattern, as properties, and base64 as a pattern.
    Raises RecursionError."""
    return _expressed(schema, schema)


def loosened(schema: Any, left_out: list[str]) -> Any:
    """``schema`` with patterns of which look-around, which no automaton has, is left out. ``left_out`` gets what is,
    and encodings that no pattern stands for. Raises RecursionError."""
    if isinstance(schema, list):
        return [loosened(each, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = _each(schema, lambda inner: loosened(inner, left_out))
    pattern = schema.get("pattern")
    encoded = [(word, how) for word in _ENCODED if isinstance(how := schema.get(word), str)]
    left_out += [f"{word} {how}" for word, how in encoded if (how, pattern) != ("base64", _BASE64)]
    if isinstance(pattern, str) and (shorter := _without_groups(pattern)) != pattern:
        found["pattern"] = shorter
        left_out.append(f"look-around in the pattern {pattern}")
    return found


def _each(schema: dict[str, Any], made: Callable[[Any], Any]) -> dict[str, Any]:
    """``schema`` with what ``made`` makes of the schemas, and lists of them, within it."""
    found = {}
    for word, value in schema.items():
        if word in BY_NAME and isinstance(value, dict):
            found[word] = {name: made(inner) for name, inner in value.items()}
        else:
            found[word] = value if word in _DATA else made(value)
    return found


def _without_groups(pattern: str) -> str:
    """``pattern`` without the groups that look around, and what says how often they do."""
    kept: list[str] = []
    at = depth = 0  # depth: of the groups within one that looks around, and itself
    while at < len(pattern):
        c, start = pattern[at], at
        if c == "\\":
            at += 2
        elif c == "[":
            at = _class_end(pattern, at)
        elif not depth and _LOOK_AROUND.match(pattern, at):
            depth, at = 1, at + 2
        elif depth and c in "()":
            depth += 1 if c == "(" else -1
            at += 1
            if not depth:
                again = _QUANTIFIER.match(pattern, at)
                at = again.end() if again else at
            continue
        else:
            at += 1
        if not depth:
            kept.append(pattern[start:at])
    return pattern if depth else "".join(kept)  # one that does not end is refused as it is


def _class_end(pattern: str, at: int) -> int:
    """Behind the class of characters that begins at ``at``."""
    at += 1 + pattern.startswith("^", at + 1)
    at += pattern.startswith("]", at)
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1


def _expressed(node: Any, root: Any) -> Any:
    if isinstance(node, list):
        return [_expressed(each, root) for each in node]
    if not isinstance(node, dict):
        return node
    found = _each(node, lambda inner: _expressed(inner, root))
    if node.get("contentEncoding") == "base64":
        found.setdefault("pattern", _BASE64)
    names = resolved(node.get("propertyNames"), root)
    if not isinstance(names, dict) or "patternProperties" in node:
        return found
    others, told = found.get("additionalProperties", {}), names.keys() - _NAMED_ALONE
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed) and told <= {"enum", "const"}:
        own = found.get("properties", {})
        found["properties"] = {name: own.get(name, {} if others is True else others) for name in listed}
        found["additionalProperties"] = False
    elif told == {"pattern"} and "properties" not in node:
        found["patternProperties"] = {names["pattern"]: {} if others is True else others}
        found["additionalProperties"] = False
    elif told:
        return found
    del found["propertyNames"]
    return found
