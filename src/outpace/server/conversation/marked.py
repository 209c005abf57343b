"""Calls that stand between marks: a function's name, then its arguments in JSON, in braces or each in tags."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from functools import cached_property
from typing import Any

from outpace.server.conversation.calls import FUNCTION_NAME, LONGEST_NAME
from outpace.server.conversation.pieces import CallParser, Reading, Schemas, ToolId
from outpace.server.conversation.spelling import CDATA, KEY, WILD, Spelling, Tags
from outpace.server.conversation.values import (
    LONGEST_KEY,
    Reads,
    Types,
    braces,
    property_of,
    raw,
    tagged,
    types_of,
    value,
)

LONGEST_MIDDLE = 128  # characters between a name and its arguments
_WORD = re.compile(
    rf"\]<\]\w+\[>\[(?:<[^<>\s]*>?)?|<[^<>\s]*>|<[^<>\s]+|\[[A-Z_]+\]|{WILD}?[^\s<\[{WILD}]+|\S"
)  # a mark, or what is none
_ID = re.compile(r"[\w.:-]")


class MarkedCalls(CallParser):
    """Reads calls as ``spelling`` says. White space between marks does not matter, and marks before a function's name
    may be missing but for the last one."""

    def __init__(self, tool_id: ToolId, schemas: Schemas, spelling: Spelling) -> None:
        super().__init__(tool_id, schemas)
        self._spelling, self._types = spelling, Types()
        self._id = ""  # what stood for the last ``WILD``
        words = _WORD.findall(spelling.begins)
        marks = [i for i, word in enumerate(words) if i == 0 or (word[0] in "<[]" and len(word) > 1)]
        several = [words.count(words[i]) > 1 for i in marks]  # of one mark: the word behind it tells them apart
        self._after = {
            "".join(words[i : i + 1 + more]): words[i + 1 + more :] for i, more in zip(marks, several, strict=True)
        }
        self.openings = tuple(self._after)
        self._end = "".join((spelling.closing + spelling.tail).split())

    def _read(self) -> Reading:
        while opening := (yield from self._until(self.openings)):
            self._settle((yield from self._section(self._after[opening])), self._end)

    def _section(self, expected: list[str]) -> Reads:
        """Calls after a first mark, up to what ends them."""
        source, spelling = self._source, self._spelling
        while True:
            if not (yield from self._passed(expected)) or not (yield from self._call()):
                return False
            self._mark, self._after_call = source.at, True
            if not (yield from self._passed(spelling.closing.split())):
                return False
            self._mark = source.at
            if not spelling.head:
                return True
            yield from source.spaces()
            tail = spelling.tail.strip()
            if tail and (yield from self._ahead(tail)):
                return (yield from self._passed(tail.split()))
            if source.ended_here:
                return True
            expected = (spelling.between + spelling.opening).split()

    def _ahead(self, expected: str) -> Reads:
        """Whether ``expected`` comes; it stays."""
        for i, character in enumerate(expected):
            if (yield from self._source.peek(i)) != character:
                return False
        return True

    def _passed(self, expected: list[str]) -> Reads:
        """Pass over marks with any white space between them."""
        source = self._source
        for word in expected:
            for i, part in enumerate(word.split(WILD)):
                if i:
                    self._id = ""
                while i and (c := (yield from source.peek())) and _ID.match(c):
                    self._id += source.take()
                yield from source.spaces()
                if not (yield from source.literal(part)):
                    return False
        return True

    def _call(self) -> Reads:
        source, spelling = self._source, self._spelling
        yield from source.spaces()
        name = ""
        while (c := (yield from source.peek())) and FUNCTION_NAME.match(c) and len(name) < LONGEST_NAME:
            name += source.take()
        if not self._known(name) or not (yield from self._middle()):
            return False
        yield from source.spaces()
        if spelling.kind == "tags":
            return (yield from self._tagged(name))
        if (yield from source.peek()) != "{":
            return False
        self._start(name)
        if spelling.kind == "braces":
            return (yield from braces(source, spelling.quote, self._argue))
        return (yield from value(source, self._argue))

    @cached_property
    def _middles(self) -> tuple[str, re.Pattern[str]]:
        """The last mark between name and arguments, and all that may stand there: an id may be missing."""
        parts = ["".join(part.split()) for part in self._spelling.middle.split(WILD)]
        ids = "".join(f"(?:{re.escape(part)}[\\w.:-]*)?" for part in parts[:-1])
        return parts[-1], re.compile(ids + re.escape(parts[-1]))

    def _middle(self) -> Reads:
        last, whole = self._middles
        text = ""
        while not (last and text.endswith(last)) and len(text) < LONGEST_MIDDLE:
            if not last:
                return True
            if not (c := (yield from self._source.peek())):
                return False
            self._source.at += 1
            text += c.strip()
        return whole.fullmatch(text) is not None

    def _tagged(self, name: str) -> Reads:
        """Arguments in tags, up to what ends the call."""
        source, tags = self._source, self._spelling.tags
        assert tags is not None
        schema = (self._schemas or {}).get(name) or {}
        ends = [word for word in _WORD.findall(self._spelling.closing) if word[0] in "<[]" and len(word) > 1]
        before = (tags.opening, *ends)
        begun = False
        while True:
            yield from source.spaces()
            if (yield from self._ahead(ends[0])):
                break
            if not (yield from self._ahead(tags.opening)):
                return False
            source.take(len(tags.opening))
            key = yield from self._key(tags.middle)
            if key is None:
                return False
            if not begun:
                self._start(name)
            self._argue(("{" if not begun else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            begun, self._mark = True, None
            if not (yield from self._value(tags, key, schema, before)):
                return False
            self._mark = source.at
        if not begun:
            self._start(name)
        self._argue("}" if begun else "{}")
        return True

    def _value(self, tags: Tags, key: str, schema: Any, before: tuple[str, ...]) -> Reads:
        """An argument's value and the tag that closes it."""
        source, part = self._source, property_of(schema, key, schema)
        closing, types = tags.closing.replace(KEY, key), types_of(part, schema, self._types)
        if WILD in tags.middle and types != {"string"} and (types or self._id == tags.flag("string")):
            types = frozenset({"string"}) if self._id == tags.flag("string") else types - {"string"}
        if KEY in tags.closing and types != {"string"}:
            return (yield from tagged(source, tags.prefix, closing, self._argue, part, schema))
        if tags.cdata:
            opened = yield from self._ahead(CDATA[0])
            if not opened and source.ended and CDATA[0].startswith(source.text[source.at :]):
                return False
        if tags.cdata and opened:
            source.take(len(CDATA[0]))
            closing, types = CDATA[1] + closing, frozenset({"string"})
        return (yield from raw(source, closing, self._argue, types, line=tags.line, before=before))

    def _key(self, middle: str) -> Generator[None, None, str | None]:
        """An argument's name, up to where its value begins."""
        source, (first, *rest) = self._source, middle.split(WILD)
        mark, key = first.split()[0] if first.split() else "", ""
        while not (yield from self._ahead(mark)):
            if not (c := (yield from source.peek())) or c == "\n" or len(key) >= LONGEST_KEY:
                return None
            key += source.take()
        words = [*first.split(), *(word for part in rest for word in (WILD + part).split())]
        if not (yield from self._passed(words)):
            return None
        tags = self._spelling.tags
        if tags is not None and tags.line and (yield from source.peek()) == "\n":
            source.at += 1
        return key.strip()
