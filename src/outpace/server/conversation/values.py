"""One value of a call's arguments, read a character at a time: JSON as it stands, or a Python literal made JSON.

JSON (RFC 8259) passes unchanged, but for control characters within strings, which models write raw and JSON forbids:
they leave as escapes. Python's quotes, constants and trailing commas become JSON's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from outpace.server.conversation.pieces import SPACE, Characters, Reading

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
