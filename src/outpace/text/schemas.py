"""JSON schemas whose objects have no other properties than those that are named: what people mean who name some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# keywords whose value is a schema or a list of them, and those whose values by name are
_INNER = frozenset((
    "additionalItems", "additionalProperties", "contains", "items", "prefixItems", "unevaluatedItems",
    "unevaluatedProperties",
))  # fmt: skip
_BESIDE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref")  # of the same value
_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_NAMING = ("properties", "patternProperties")
_DECIDING = ("additionalProperties", "unevaluatedProperties")


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` in every object that names properties and does not say what it
    makes of others. Where several schemas describe one value together (``allOf``, ``if``, ``$ref`` beside properties),
    each names but some of its properties: those stay open. Raises RecursionError."""
    return _closed(schema, _together(schema))


def _together(root: Any) -> set[int]:
    """Ids of all schemas that describe a value together with another one."""
    found: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        node, together = waiting.pop()
        if not isinstance(node, dict) or (id(node), together) in seen:
            continue
        seen.add((id(node), together))
        beside = {word: list(_children(word, node[word], root)) for word in _BESIDE if word in node}
        names = any(word in node for word in _NAMING)
        several = together or names or len(beside) > 1 or len(beside.get("allOf", ())) > 1
        several = several or not beside.keys() <= {"allOf", "anyOf", "oneOf", "$ref"}
        described = any(_describes(child) for children in beside.values() for child in children)
        if together or (names and described):
            found.add(id(node))
        waiting += [(child, several) for children in beside.values() for child in children]
        for word, value in node.items():
            if word not in beside:
                waiting += [(child, False) for child in _children(word, value, root)]
    return found


def _describes(schema: Any) -> bool:
    """Whether ``schema`` may name properties."""
    return isinstance(schema, dict) and any(word in schema for word in (*_NAMING, *_BESIDE))


def _children(word: str, value: Any, root: Any) -> Iterator[Any]:
    """The schemas in a keyword's ``value``."""
    if word == "$ref":
        yield referred(value, root)
    elif word in _BY_NAME:
        yield from value.values() if isinstance(value, dict) else ()
    elif word in _INNER or word in _BESIDE:
        yield from value if isinstance(value, list) else (value,)


def referred(pointer: Any, root: Any) -> Any:
    """What a JSON pointer within ``root`` (RFC 6901) stands for; None: nothing."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    node = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict):
            node = node.get(name)
        else:
            return None
    return node


def _closed(node: Any, together: set[int]) -> Any:
    if isinstance(node, list):
        return [_closed(each, together) for each in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for word, value in node.items():
        if word in _BY_NAME and isinstance(value, dict):
            found[word] = {name: _closed(each, together) for name, each in value.items()}
        else:
            found[word] = _closed(value, together) if word in _INNER or word in _BESIDE else value
    named = any(isinstance(node.get(word), dict) for word in _NAMING)
    if named and id(node) not in together and not any(word in node for word in _DECIDING):
        found["additionalProperties"] = False
    return found
