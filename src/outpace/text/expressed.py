"""JSON schemas in the keywords that a grammar can express: what means the same, and what is left out."""

from __future__ import annotations

import re
from typing import Any

from outpace.text.schemas import resolved

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_NAMED_ALONE = frozenset(("type", "title", "description"))  # keywords that say nothing of a text


def expressed(schema: Any) -> Any:
    """``schema`` with names that ``propertyNames`` lists, or their pattern, as properties. Raises RecursionError."""
    return _expressed(schema, schema)


def without_look_around(schema: Any, left_out: list[str]) -> Any:
    """``schema`` with patterns of which look-around, which no automaton has, is left out, as ``left_out`` then says.
    Raises RecursionError."""
    if isinstance(schema, list):
        return [without_look_around(each, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {word: without_look_around(value, left_out) for word, value in schema.items()}
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (shorter := _without_groups(pattern)) != pattern:
        found["pattern"] = shorter
        left_out.append(f"look-around in the pattern {pattern}")
    return found


def _without_groups(pattern: str) -> str:
    """``pattern`` without the groups that look around."""
    while found := _LOOK_AROUND.search(pattern):
        depth, at, in_class = 0, found.start(), False
        while at < len(pattern):
            c = pattern[at]
            if c == "\\":
                at += 1
            elif in_class:
                in_class = c != "]"
            elif c == "[":
                in_class = True
                at += pattern.startswith(("]", "^]"), at + 1)
            elif c in "()":
                depth += 1 if c == "(" else -1
                if not depth:
                    break
            at += 1
        pattern = pattern[: found.start()] + pattern[at + 1 :]
    return pattern


def _expressed(node: Any, root: Any) -> Any:
    if isinstance(node, list):
        return [_expressed(each, root) for each in node]
    if not isinstance(node, dict):
        return node
    found = {word: _expressed(value, root) for word, value in node.items()}
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
