"""One value of a call's arguments, read a character at a time and made JSON text.

JSON (RFC 8259) passes as it stands, but for control characters within strings, which models write raw and JSON
forbids: they leave as escapes. Python's quotes, constants and trailing commas become JSON's. Text without quotes, as
between tags, becomes what its schema's types say.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from outpace.server.conversation.pieces import SPACE, Characters, Reading, beginning
from outpace.text.schemas import referred, resolved

DEEPEST = 64  # open brackets; a model that goes on opening them is not making a call

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")  # of a string: whatever the dialect, it stands for itself
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON_WORDS = _WORDS | {"True": "true", "False": "false", "None": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_PYTHON_ESCAPES = {"a": "\a", "v": "\v", "'": "'", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}

Reads = Generator[None, None, bool]  # whether it was well-formed; what was not is left unread


def value(source: Characters, emit: Callable[[str], None], *, python: bool = False) -> Reads:
    """Read one value and ``emit`` its JSON text as far as it is well-formed."""
    closers: list[str] = []  # of the brackets that are open
    while True:
        if closers:
            yield from _gap(source, emit, python)
        c = yield from source.peek()
        if c and c in "{[" and len(closers) < DEEPEST:
            _pass(source, emit)
            closers.append("}" if c == "{" else "]")
            if not (yield from _first(source, emit, closers, python)):
                return False
            if closers and closers[-1]:  # not empty: its first value, or key and value, follows
                continue
            closers.pop()
        elif not (yield from _scalar(source, emit, python)):
            return False
        while closers:  # after a value
            yield from _gap(source, emit, python)
            c = yield from source.peek()
            if c == closers[-1]:
                _pass(source, emit)
                closers.pop()
                continue
            if c != ",":
                return False
            source.at += 1
            if not python:
                emit(",")
            yield from _gap(source, emit, python)
            if python and (yield from source.peek()) == closers[-1]:
                continue
            if python:
                emit(", ")
            if closers[-1] == "}" and not (yield from _key(source, emit, python)):
                return False
            break
        if not closers:
            return True


def string(source: Characters, into: list[str]) -> Reads:
    """Read a string and append what it stands for to ``into``."""
    text: list[str] = []
    if not (yield from _string(source, text.append, False)):
        return False
    found = json.loads("".join(text))
    if any("\ud800" <= c <= "\udfff" for c in found):  # half a pair, which is no text
        return False
    into.append(found)
    return True


def _first(source: Characters, emit: Callable[[str], None], closers: list[str], python: bool) -> Reads:
    """After an opening bracket: a first key, or the closing bracket, which leaves "" in its place."""
    yield from _gap(source, emit, python)
    if (yield from source.peek()) == closers[-1]:
        _pass(source, emit)
        closers[-1] = ""
        return True
    return closers[-1] == "]" or (yield from _key(source, emit, python))


def _key(source: Characters, emit: Callable[[str], None], python: bool) -> Reads:
    if not (yield from _string(source, emit, python)):
        return False
    yield from _gap(source, emit, python)
    if (yield from source.peek()) != ":":
        return False
    source.at += 1
    emit(": " if python else ":")
    return True


def _gap(source: Characters, emit: Callable[[str], None], python: bool) -> Reading:
    """White space, which is kept in JSON."""
    while (c := (yield from source.peek())) and c in SPACE:
        source.at += 1
        if not python:
            emit(c)


def _pass(source: Characters, emit: Callable[[str], None]) -> None:
    emit(source.text[source.at])
    source.at += 1


def _scalar(source: Characters, emit: Callable[[str], None], python: bool) -> Reads:
    c = yield from source.peek()
    if c == '"' or (python and c == "'"):
        return (yield from _string(source, emit, python))
    if c and (c == "-" or c in "0123456789"):
        number = ""
        while (c := (yield from source.peek())) and c in "0123456789+-.eE":
            _pass(source, emit)
            number += c
        return _NUMBER.fullmatch(number) is not None
    words, word = (_PYTHON_WORDS if python else _WORDS), ""
    while c := (yield from source.peek(len(word))):
        word += c
        if word in words:  # emitted whole: what it becomes is known at its end
            source.take(len(word))
            emit(words[word])
            return True
        if not any(known.startswith(word) for known in words):
            return False
    emit(source.take(len(word)))
    return False


def _string(source: Characters, emit: Callable[[str], None], python: bool) -> Reads:
    quote = yield from source.peek()
    if quote != '"' and not (python and quote == "'"):
        return False
    source.at += 1
    emit('"')
    while c := (yield from source.peek()):
        if run := _PLAIN.match(source.text, source.at):
            emit(source.take(len(run[0])))
            continue
        if c == "\\":
            if not (yield from _escape(source, emit, python)):
                return False
            continue
        source.at += 1
        if c == quote:
            emit('"')
            return True
        emit(json.dumps(c)[1:-1] if c < " " or c == '"' else c)
    return False


def _escape(source: Characters, emit: Callable[[str], None], python: bool) -> Reads:
    """An escape, emitted whole; in Python one that is unknown stands for its own characters."""
    c = yield from source.peek(1)
    digits = (_HEX_ESCAPES if python else {"u": 4}).get(c, 0)
    for n in range(digits):
        digit = yield from source.peek(2 + n)
        if digit and digit not in _HEX:
            return False
    if not python and c and c not in '"\\/bfnrtu':
        return False
    written = source.take(2 + digits)
    if len(written) < 2 + digits:  # the answer ends here
        emit(written)
        return False
    if not python:
        emit(written)
    elif digits:
        code = int(written[2:], 16)
        emit(json.dumps(chr(code) if code <= 0x10FFFF else written)[1:-1])
    else:
        emit(written if c in '"\\bfnrt' else json.dumps(_PYTHON_ESCAPES.get(c, written))[1:-1])
    return True


def until(
    source: Characters, end: str, emit: Callable[[str], None], *, line: bool = False, before: tuple[str, ...] = ()
) -> Reads:
    """Read and ``emit`` text up to ``end``, which is passed over. ``line``: a line break before it, too. ``before``:
    one of these must follow, or the answer's end: another ``end`` is text."""
    while True:
        text = source.text
        found = text.find(end, source.at)
        while found >= 0 and _follows(source, found + len(end), before) is None:
            found = text.find(end, found + 1)
        certain = found >= 0 and _follows(source, found + len(end), before)
        stop = found if found >= 0 else len(text)
        if line and found >= 0 and text[source.at : stop].endswith("\n"):
            stop -= 1
        if found < 0:  # at the answer's end, too: an end that was cut off is none of the text
            stop -= beginning(text, source.at, (end, "\n" + end) if line else (end,))
        if stop > source.at:
            emit(source.take(stop - source.at))
        if certain or source.ended:
            source.at = len(text) if found < 0 else found + len(end)
            return found >= 0
        yield


def _follows(source: Characters, at: int, words: tuple[str, ...]) -> bool | None:
    """Whether one of ``words``, if there are any, follows ``at`` after white space, or the answer's end; None: nothing
    does; False: that is not certain yet."""
    while words and at < len(source.text) and source.text[at] in SPACE:
        at += 1
    if not words or source.text.startswith(words, at):
        return True
    rest = source.text[at : at + max(map(len, words))]
    return source.ended if any(word.startswith(rest) for word in words) else None


def raw(
    source: Characters,
    end: str,
    emit: Callable[[str], None],
    types: frozenset[str],
    *,
    line: bool,
    before: tuple[str, ...] = (),
) -> Reads:
    """Read text without quotes up to ``end`` as a value of ``types`` (of JSON schemas; none: unknown). A text's
    characters are emitted as they come, anything else at its end. ``line``, ``before``: see ``until``."""
    if types == {"string"}:
        emit('"')
        if not (yield from until(source, end, lambda text: emit(escaped(text)), line=line, before=before)):
            return False
        emit('"')
        return True
    texts: list[str] = []
    ended = yield from until(source, end, texts.append, line=line, before=before)
    if ended:
        emit(typed("".join(texts), types))
    return ended


def escaped(text: str) -> str:
    """``text`` within quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written without quotes: in JSON or Python if that is one of ``types``."""
    found: Any = text
    for read in (_read_json, ast.literal_eval):
        try:
            found = read(text.strip()) if read is _read_json or len(text) <= LONGEST_LITERAL else text
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # neither halves of pairs nor infinities
            break
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            found = text
    if isinstance(found, float) and found.is_integer() and "integer" in types and "number" not in types:
        found = int(found)
    kind = _kind(found)
    if isinstance(found, str) or (types and kind not in types and not (kind == "integer" and "number" in types)):
        found = text
    return json.dumps(found, ensure_ascii=False)


def _read_json(text: str) -> Any:
    return json.loads(text, parse_constant=no_constant)


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


LONGEST_LITERAL = 1 << 14  # characters of Python
_KINDS: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "array")


Types = dict[int, frozenset[str]]  # by a schema's id
DEEPEST_TYPES = 64  # schemas within schemas of one value


def types_of(schema: Any, root: Any, known: Types | None = None, depth: int = DEEPEST_TYPES) -> frozenset[str]:
    """The types that ``schema``, within ``root``, allows; none where it does not say. ``known``: those of schemas that
    were seen before, of which each is looked at once."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    known = {} if known is None else known
    if id(schema) not in known:
        known[id(schema)] = frozenset()  # of one that refers to itself
        known[id(schema)] = _types_of(schema, root, known, depth - 1)
    return known[id(schema)]


def _types_of(schema: Mapping[str, Any], root: Any, known: Types, depth: int) -> frozenset[str]:
    if "$ref" in schema:
        return types_of(referred(schema["$ref"], root), root, known, depth)
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        return frozenset(names) if all(isinstance(name, str) for name in names) else frozenset()
    if "const" in schema or isinstance(schema.get("enum"), list):
        listed = schema.get("enum", [schema.get("const")])
        return frozenset(map(_kind, listed)) if isinstance(listed, list) else frozenset()
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [types_of(one, root, known, depth) for one in schema[word]]
            return frozenset().union(*each) if all(each) else frozenset()
    if isinstance(schema.get("allOf"), list):
        found = [types for one in schema["allOf"] if (types := types_of(one, root, known, depth))]
        return frozenset.intersection(*found) if found else frozenset()
    return frozenset()


def braces(source: Characters, quote: str, emit: Callable[[str], None], depth: int = DEEPEST) -> Reads:
    """Read a value as Gemma 4 writes it: keys are bare, and ``quote`` stands at both ends of a text."""
    yield from source.spaces()
    c = yield from source.peek()
    if c in ("{", "["):
        if not depth:
            return False
        source.at += 1
        emit(c)
        close, first = "}" if c == "{" else "]", True
        while True:
            yield from source.spaces()
            if (yield from source.peek()) == close and first:
                break
            if not first:
                emit(", ")
            if c == "{" and not (yield from _bare_key(source, quote, emit)):
                return False
            if not (yield from braces(source, quote, emit, depth - 1)):
                return False
            first = False
            yield from source.spaces()
            following = yield from source.peek()
            if following not in (",", close) or not following:
                return False
            if following == close:
                break
            source.at += 1
        source.at += 1
        emit(close)
        return True
    if c == quote[0]:
        if not (yield from source.literal(quote)):
            return False
        return (yield from raw(source, quote, emit, frozenset({"string"}), line=False))
    return (yield from _scalar(source, emit, True))  # its template writes None


def _bare_key(source: Characters, quote: str, emit: Callable[[str], None]) -> Reads:
    key = ""
    if (yield from source.peek()) == quote[0]:
        texts: list[str] = []
        if not (yield from source.literal(quote)) or not (yield from until(source, quote, texts.append)):
            return False
        key = "".join(texts)
        yield from source.spaces()
    else:
        while (c := (yield from source.peek())) and c not in ":{}[],\n" and len(key) < LONGEST_KEY:
            key += source.take()
    if not (yield from source.literal(":")):
        return False
    emit(json.dumps(key, ensure_ascii=False) + ": ")
    return True


def property_of(schema: Any, key: str, root: Any) -> Any:
    """What ``schema``, within ``root``, says of a property; None: nothing."""
    return _inner(schema, root, lambda found: (found.get("properties") or {}).get(key))


def _inner(schema: Any, root: Any, of: Callable[[Mapping[str, Any]], Any], depth: int = DEEPEST_TYPES) -> Any:
    """What ``of`` finds in ``schema`` or in one that it is made of."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return None
    if (found := of(schema)) is not None:
        return found
    parts = (part for word in ("anyOf", "oneOf", "allOf") for part in schema.get(word) or ())
    return next((found for part in parts if (found := _inner(part, root, of, depth - 1)) is not None), None)


ITEM = "item"  # a list's tags


def tagged(
    source: Characters, prefix: str, end: str, emit: Callable[[str], None], schema: Any, root: Any, depth: int = DEEPEST
) -> Reads:
    """Read a value up to ``end``, a closing tag: text, or tags by property or item, as MiniMax M3 writes objects and
    lists. ``prefix``: precedes every tag."""
    types = types_of(schema, root)
    ahead, tag = "", prefix + "<"
    if types != {"string"}:
        while len(ahead) <= len(tag) and (c := (yield from source.peek(len(ahead)))) and tag.startswith(ahead):
            ahead += c
    if not ahead.startswith(tag) or ahead.endswith("/"):
        if types & {"array", "object"} and (yield from _closes(source, end)):
            emit("[]" if "array" in types else "{}")
            return True
        return (yield from raw(source, end, emit, types, line=False))
    listed: bool | None = None
    while not (yield from _closes(source, end)):
        if not depth or not (yield from source.literal(tag)):
            return False
        key = ""
        while (c := (yield from source.peek())) and c not in "<>\n" and len(key) < LONGEST_KEY:
            key += source.take()
        if not (yield from source.literal(">")):
            return False
        first = listed is None
        if listed is None:
            listed = key == ITEM and (not types or "array" in types)
        emit(("[" if listed else "{") if first else ", ")
        if not listed:
            emit(json.dumps(key, ensure_ascii=False) + ": ")
        inner = _inner(schema, root, lambda found: found.get("items")) if listed else property_of(schema, key, root)
        if not (yield from tagged(source, prefix, f"{tag}/{key}>", emit, inner, root, depth - 1)):
            return False
        yield from source.spaces()
    emit("]" if listed else "}")
    return True


def _closes(source: Characters, end: str) -> Reads:
    """Pass over ``end`` if it comes here."""
    for i, character in enumerate(end):
        if (yield from source.peek(i)) != character:
            return False
    source.take(len(end))
    return True


LONGEST_KEY = 256  # characters
