"""Calls of functions in an answer's text: as JSON objects, or as Python calls.

Objects are ``{"name": ..., "arguments": {...}}``, alone or in a list, their keys in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from outpace.server.conversation.pieces import CallParser, Reading, Schemas, ToolId
from outpace.server.conversation.values import Reads, no_constant, string, value

LONGEST_NAME = 128  # of a function, in requests as in answers
PYTHON_TAG, FUNCTION, FUNCTION_END = "<|python_tag|>", "<function=", "</function>"
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]")
NAMES, ARGUMENTS = frozenset({"name", "tool_name"}), frozenset({"arguments", "parameters"})
OTHERS = frozenset({"type", "id", "tool_call_id"})  # what a call may say before it is certain to be one


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
            if key in NAMES and name is None:
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
        return isinstance(json.loads(text, parse_constant=no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _ignore(text: str) -> None:
    """Fields beside a call's name and arguments are no part of it."""


class TaggedCalls(ObjectCalls):
    """Calls as Hermes, Qwen 3, Granite and Mistral's first models write them: between an opening and a closing mark
    (none: up to where they end), which may hold one object, several, or a list of them."""

    def __init__(self, tool_id: ToolId, schemas: Schemas, marks: tuple[str, str]) -> None:
        super().__init__(tool_id, schemas)
        self.openings, self._end = marks[:1], marks[1]

    def _read(self) -> Reading:
        while (yield from self._until(self.openings)):
            self._settle((yield from self._tagged()), self._end)

    def _tagged(self) -> Reads:
        """What follows an opening mark, up to the closing one or the answer's end."""
        source = self._source
        yield from source.spaces()
        while True:
            if not (yield from self._calls_at()):
                return False
            yield from source.spaces()
            if not self._end:
                return True
            if (yield from source.peek()) == self._end[0]:
                return (yield from source.literal(self._end))


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
    """Calls as Gemma 3 and LFM2 write them, by what the prompt asked for: JSON objects, or Python calls with keyword
    arguments.

    They stand between marks, or are the whole answer in brackets: without a mark they are looked for only where an
    answer begins.
    """

    def __init__(self, tool_id: ToolId, schemas: Schemas, openings: tuple[str, ...], end: str) -> None:
        super().__init__(tool_id, schemas)
        self.openings, self._end = openings, end

    def _read(self) -> Reading:
        source = self._source
        self._mark = 0
        yield from source.spaces()
        if (c := (yield from source.peek())) and c in "{[":
            yield from self._calls_at()
        self._settle(False)
        while (yield from self._until(self.openings)):
            self._settle((yield from self._fenced()), self._end)

    def _fenced(self) -> Reads:
        source = self._source
        while True:
            yield from source.spaces()
            if not (yield from self._calls_at()):
                return False
            yield from source.spaces()
            if (yield from source.peek()) == self._end[0]:
                return (yield from source.literal(self._end))

    def _call(self) -> Reads:
        if (yield from self._source.peek()) == "{":
            return (yield from super()._call())
        name = yield from self._name()
        if not (yield from self._source.literal("(")):
            return False
        if name != "print" or (self._schemas is not None and name in self._schemas):
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
        while (c := (yield from self._source.peek())) and FUNCTION_NAME.match(c) and len(name) < LONGEST_NAME:
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
