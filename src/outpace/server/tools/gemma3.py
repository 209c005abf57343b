"""Calls as Gemma 3 writes them, by what its prompt asked for: JSON objects, or Python calls with keyword arguments.

Either stands in a fenced block, or is the whole answer in brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from outpace.server.tools.base import Reading
from outpace.server.tools.calls import ObjectCalls
from outpace.server.tools.values import Reads, value

FENCES = ("```tool_call", "```tool_code", "```json")
FENCE = "```"
LONGEST_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]")


class FencedCalls(ObjectCalls):
    """Calls without a fence are looked for only where an answer begins."""

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
