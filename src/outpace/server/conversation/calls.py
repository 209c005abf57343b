"""Calls of functions in an answer's text, in each format that models write.

Most are JSON objects, ``{"name": ..., "arguments": {...}}``, alone or in a list, their keys in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from outpace.server.conversation.pieces import SPACE, CallParser, Characters, Reading

# -- values -----------------------------------------------------------------------------------------------------------
# One value of a call's arguments, read a character at a time: JSON as it stands, or a Python literal made JSON.
# JSON (RFC 8259) passes unchanged, but for control characters within strings, which models write raw and JSON forbids:
# they leave as escapes. Python's quotes, constants and trailing commas become JSON's.

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


LONGEST_NAME = 64
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG, FUNCTION, FUNCTION_END = "<|python_tag|>", "<function=", "</function>"
FENCES = ("```tool_call", "```tool_code", "```json")
FENCE = "```"
_NAME = re.compile(r"[A-Za-z0-9_.-]")
ARGUMENTS = frozenset({"arguments", "parameters"})
OTHERS = frozenset({"type", "id"})  # what a call may say before it is certain to be one


class ObjectCalls(CallParser):
    """Reads calls that are JSON objects. What is read is undecided from ``_mark`` on until a call is certain."""

    def _calls_at(self) -> Reads:
        """A call or a list of calls, here. False: it stopped being one, perhaps after some."""
        source = self._source
        if (yield from source.peek()) != "[":
            return (yield from self._call())
        source.at += 1
        while True:
            yield from source.spaces()
            if not (yield from self._call()):
                return False
            yield from source.spaces()
            c = yield from source.peek()
            if c not in (",", "]"):
                return False
            source.at += 1
            if c == "]":
                self._mark = source.at
                return True

    def _call(self) -> Reads:
        """One object. It is a call as soon as its name and the beginning of its arguments are known.

        Afterwards ``_mark`` stands behind what was taken up.
        """
        source = self._source
        if (yield from source.peek()) != "{":
            return False
        source.at += 1
        name: str | None = None
        waiting: list[str] | None = None  # arguments that came before the name
        started = False
        while True:
            yield from source.spaces()
            keys: list[str] = []
            if not (yield from string(source, keys)):
                return False
            key = keys[0]
            yield from source.spaces()
            if not (yield from source.literal(":")):
                return False
            yield from source.spaces()
            if key == "name" and name is None:
                names: list[str] = []
                if not (yield from string(source, names)) or not self._known(names[0]):
                    return False
                name = names[0]
            elif key in ARGUMENTS and waiting is None:
                waiting = []
                started = name is not None and (yield from source.peek()) == "{"
                if started and name is not None:
                    self._start(name)
                    if not (yield from value(source, self._argue)):
                        return False
                elif not (yield from self._arguments(waiting)):
                    return False
            elif not (started or key in OTHERS) or not (yield from value(source, _ignore)):
                return False
            if name is not None and waiting and not started:
                self._start(name)
                self._argue("".join(waiting))
                started = True
            if started:
                self._mark = source.at
            yield from source.spaces()
            c = yield from source.peek()
            if c not in (",", "}"):
                return False
            source.at += 1
            if c == "}":
                break
        if name is None:
            return False
        if not started:  # a function without arguments
            self._start(name)
            self._argue("{}")
        self._mark = source.at
        self._after_call = True
        return True

    def _arguments(self, into: list[str]) -> Reads:
        """Arguments whose call is not certain yet: an object, an object written as a string, or null."""
        source = self._source
        match (yield from source.peek()):
            case "{":
                return (yield from value(source, into.append))
            case '"':
                texts: list[str] = []
                if not (yield from string(source, texts)) or not _is_object(texts[0]):
                    return False
                into.append(texts[0])
                return True
            case "n":
                into.append("{}")
                return (yield from value(source, _ignore))
        return False


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _ignore(text: str) -> None:
    """Fields beside a call's name and arguments are no part of it."""


class TaggedCalls(ObjectCalls):
    """Calls as Hermes and Qwen 3 write them: in ``<tool_call>`` and ``</tool_call>``, which may hold one object,
    several, or a list of them (SmolLM2)."""

    def _read(self) -> Reading:
        while (yield from self._until((TOOL_CALL,))):
            self._settle((yield from self._tagged()), TOOL_CALL_END)

    def _tagged(self) -> Reads:
        """What follows an opening tag, up to the closing one or the answer's end."""
        source = self._source
        yield from source.spaces()
        while True:
            if not (yield from self._calls_at()):
                return False
            yield from source.spaces()
            if (yield from source.peek()) == "<":
                return (yield from source.literal(TOOL_CALL_END))


class BareCalls(ObjectCalls):
    """Calls as Llama 3.1 to 3.3 write them: the whole answer is a JSON object with ``parameters``, or several with
    ``;`` between them.

    ``<|python_tag|>`` may precede them; ``<function=name>{...}</function>`` is the older spelling. Calls without a mark
    are looked for where an answer begins, and after other calls.
    """

    def _read(self) -> Reading:
        self._mark = 0
        yield from self._objects()
        self._settle(False, ";")
        while opening := (yield from self._until((PYTHON_TAG, FUNCTION))):
            if opening == FUNCTION:
                self._settle((yield from self._function()), FUNCTION_END)
            else:
                yield from self._objects()
                self._settle(False, ";")

    def _objects(self) -> Reading:
        """As many objects as there are."""
        source = self._source
        yield from source.spaces()
        while (yield from self._calls_at()):
            yield from source.spaces()
            if (yield from source.peek()) == ";":
                source.at += 1
                yield from source.spaces()

    def _function(self) -> Reads:
        source, name = self._source, ""
        while (c := (yield from source.peek(len(name)))) and c not in "><\n" and len(name) < LONGEST_NAME:
            name += c
        if c != ">" or not self._known(name):
            return False
        source.take(len(name) + 1)
        yield from source.spaces()
        if (yield from source.peek()) != "{":
            return False
        self._start(name)
        if not (yield from value(source, self._argue)):
            return False
        self._mark, self._after_call = source.at, True
        yield from source.spaces()
        return (yield from source.literal(FUNCTION_END))


class FencedCalls(ObjectCalls):
    """Calls as Gemma 3 writes them, by what the prompt asked for: JSON objects, or Python calls with keyword arguments.

    They stand in a fenced block, or are the whole answer in brackets: without a fence they are looked for only where an
    answer begins.
    """

    def _read(self) -> Reading:
        source = self._source
        self._mark = 0
        yield from source.spaces()
        if (c := (yield from source.peek())) and c in "{[":
            yield from self._calls_at()
        self._settle(False)
        while (yield from self._until(FENCES)):
            self._settle((yield from self._fenced()), FENCE)

    def _fenced(self) -> Reads:
        source = self._source
        while True:
            yield from source.spaces()
            if not (yield from self._calls_at()):
                return False
            yield from source.spaces()
            if (yield from source.peek()) == "`":
                return (yield from source.literal(FENCE))

    def _call(self) -> Reads:
        if (yield from self._source.peek()) == "{":
            return (yield from super()._call())
        name = yield from self._name()
        if not (yield from self._source.literal("(")):
            return False
        if name != "print" or (self._names is not None and name in self._names):
            return (yield from self._keywords(name))
        yield from self._source.spaces()  # Gemma's own examples print what a call gives
        if not (yield from self._keywords_of_named()):
            return False
        yield from self._source.spaces()
        if not (yield from self._source.literal(")")):
            return False
        self._mark = self._source.at
        return True

    def _keywords_of_named(self) -> Reads:
        name = yield from self._name()
        return (yield from self._source.literal("(")) and (yield from self._keywords(name))

    def _name(self) -> Generator[None, None, str]:
        name = ""
        while (c := (yield from self._source.peek())) and _NAME.match(c) and len(name) < LONGEST_NAME:
            name += self._source.take()
        return name

    def _keywords(self, name: str) -> Reads:
        """Arguments up to the closing bracket; a positional one has no name to go under, so it is no call."""
        source = self._source
        if not self._known(name):
            return False
        started = False
        while True:
            yield from source.spaces()
            if (yield from source.peek()) == ")":
                break
            key = yield from self._name()
            yield from source.spaces()
            if not key or not (yield from source.literal("=")):
                return False
            yield from source.spaces()
            if not started:
                self._start(name)
            self._argue(("{" if not started else ", ") + json.dumps(key) + ": ")
            started, self._mark = True, None
            if not (yield from value(source, self._argue, python=True)):
                return False
            self._mark = source.at
            yield from source.spaces()
            if (c := (yield from source.peek())) not in (",", ")"):
                return False
            if c == ",":
                source.at += 1
        if not started:
            self._start(name)
        source.at += 1
        self._argue("}" if started else "{}")
        self._mark, self._after_call = source.at, True
        return True
