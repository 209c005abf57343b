"""JSON schemas whose objects have no other properties than those that are named: what people mean who name some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urldefrag, urljoin

from outpace.errors import GrammarError

# keywords whose value is a schema or a list of them, and those whose values by name are
_INNER = frozenset((
    "additionalItems", "additionalProperties", "contains", "items", "prefixItems", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
))  # fmt: skip
_BESIDE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref")  # of the same value
BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_NAMING = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_TEXTS = ("pattern", "format", "$ref")
_KNOWN = ("http://json-schema.org/", "https://json-schema.org/")  # whose own schemas llguidance has
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
    elif word in BY_NAME:
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


def resolved(schema: Any, root: Any) -> Any:
    """``schema``, or what its ``$ref`` leads to in the end; None: nothing, or back to itself."""
    seen = set[int]()
    while isinstance(schema, dict) and "$ref" in schema:
        if id(schema) in seen:
            return None
        seen.add(id(schema))
        schema = referred(schema["$ref"], root)
    return schema


def check(schema: Any) -> None:
    """Raise GrammarError, which names the keyword, for values of keywords that are of a wrong type, and for a ``$ref``
    that leads back to itself, to nothing, or to another document. A null is no value."""
    waiting, later = [(schema, "")], list[tuple[Any, str]]()  # with what pointers are relative to: a ``$id`` moves it
    seen, led = set[int](), set[int]()
    lost, documents, outside = "", set[str](), dict[str, str]()
    while waiting or later:
        node, base = (waiting or later).pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        for word, value in node.items():
            if value is not None and (wanted := _wrong(word, value)):
                raise GrammarError(f"the JSON schema's {word} is {str(value)[:80]}: give {wanted}")
        pointer, name = node.get("$ref"), node.get("$id")
        if isinstance(name, str):
            base = _absolute(base, name)
            documents.add(base)
        for word, value in node.items():
            found = later if word == "$ref" else waiting  # where it stands comes first: its base is known there
            found += [(each, base) for each in _children(word, value, schema)]
        if isinstance(pointer, str) and not pointer.startswith(("#", *_KNOWN)):
            outside[_absolute(base, pointer)] = pointer
        if isinstance(pointer, str) and pointer.startswith("#/") and referred(pointer, schema) is None:
            lost = lost or pointer
        way = set[int]()
        while isinstance(node, dict) and "$ref" in node and id(node) not in led:
            if id(node) in way:
                raise GrammarError(f"the JSON schema's $ref {node['$ref'][:300]} leads back to itself: mend it")
            way.add(id(node))
            node = referred(node["$ref"], schema)
        led |= way
    for document, pointer in outside.items():
        if document not in documents:
            raise GrammarError(
                f"the JSON schema's $ref {pointer[:300]} leads to another document, and none is fetched: put what it "
                "names under $defs, and refer to it as #/$defs/NAME"
            )
    if lost and not documents:
        raise GrammarError(f"the JSON schema's $ref {lost[:300]} leads to nothing: define it there, under $defs say")


def _absolute(base: str, pointer: str) -> str:
    """The document that ``pointer`` names beside ``base``."""
    try:
        return urldefrag(urljoin(base, pointer)).url
    except ValueError:  # no address
        return pointer


def _wrong(word: str, value: Any) -> str:
    """What ``value`` should be, if it is not."""
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if word in BY_NAME:
        fits = isinstance(value, dict) and all(isinstance(each, (dict, bool, type(None))) for each in value.values())
        return "" if fits else "schemas by name"
    if word in _LISTS:
        fits = isinstance(value, list) and all(isinstance(each, (dict, bool)) for each in value)
        return "" if fits else "a list of schemas"
    if word == "type":
        return "" if isinstance(value, str) or texts else "a type's name, or a list of them"
    if word == "required":
        return "" if texts else "a list of names"
    if word == "enum":
        return "" if isinstance(value, list) else "a list of values"
    if word in _TEXTS:
        return "" if isinstance(value, str) else "a text"
    if word in _INNER or word in _BESIDE:
        fits = isinstance(value, (dict, bool)) or (word == "items" and isinstance(value, list))
        return "" if fits else "a schema"
    return ""


def _closed(node: Any, together: set[int]) -> Any:
    if isinstance(node, list):
        return [_closed(each, together) for each in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for word, value in node.items():
        if word in BY_NAME and isinstance(value, dict):
            found[word] = {name: _closed(each, together) for name, each in value.items()}
        else:
            found[word] = _closed(value, together) if word in _INNER or word in _BESIDE else value
    named = any(isinstance(node.get(word), dict) for word in _NAMING)
    if named and id(node) not in together and not any(word in node for word in _DECIDING):
        found["additionalProperties"] = False
    return found
