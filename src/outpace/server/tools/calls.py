"""Calls as JSON objects: ``{"name": ..., "arguments": {...}}``, alone or in a list, their keys in any order."""

from __future__ import annotations

import json

from outpace.server.tools.base import CallParser
from outpace.server.tools.values import Reads, string, value

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
    """What is said beside a call's name and arguments is no part of it."""
