"""Harmony (gpt-oss): an answer is messages in channels, which are reasoning, calls, or the answer proper.

A message is ``<|start|>``, a role, ``<|channel|>``, the channel, ``<|message|>`` and its text, up to ``<|end|>``,
``<|call|>`` or ``<|return|>``; ``to=functions.NAME`` beside role or channel makes a call of it. Source: OpenAI's
description of the format, https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re

from outpace.server.conversation.pieces import CallParser, Reading, Text, Thought, beginning
from outpace.server.conversation.values import Reads, value

MESSAGE, BEGINS = "<|message|>", ("<|channel|>", "<|start|>", " to=", "to=")
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
LONGEST_HEADER = 256  # characters
_TO = re.compile(r"\bto=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelParser(CallParser):
    """Of an answer whose prompt ends with ``<|start|>assistant``. Text outside of messages is text."""

    openings = BEGINS[:2]

    def _read(self) -> Reading:
        source = self._source
        self._mark = 0
        if not (yield from self._begins()):
            source.at = 0
            self._mark = None
            yield from self._body(Text)
        while not source.ended_here:
            self._mark = source.at
            yield from source.spaces()
            if (yield from source.peek()) == "":
                self._mark = None
                return
            if not (yield from self._header()):
                self._keep()
                yield from self._body(Text)
                continue
            header = source.text[self._mark : source.at]
            channel, to = _CHANNEL.search(header), _TO.search(header)
            if to and self._known(to[1]):
                yield from self._call(to[1])
                continue
            self._mark = None
            yield from self._body(Thought if channel and channel[1] == "analysis" else Text)

    def _begins(self) -> Reads:
        """Whether the answer begins with a header."""
        text = ""
        while c := (yield from self._source.peek(len(text))):
            text += c
            if text.startswith(BEGINS):
                return True
            if not any(begin.startswith(text) for begin in BEGINS):
                return False
        return False

    def _header(self) -> Reads:
        """Up to and with ``<|message|>``."""
        source, read = self._source, ""
        while not read.endswith(MESSAGE):
            if not (c := (yield from source.peek())) or len(read) > LONGEST_HEADER:
                return False
            source.at += 1
            read += c
        return True

    def _call(self, name: str) -> Reading:
        source = self._source
        yield from source.spaces()
        if (yield from source.peek()) == "{":
            self._start(name)
            if (yield from value(source, self._argue)):
                yield from source.spaces()
        self._mark = None
        yield from self._body(Text)

    def _body(self, what: type[Text] | type[Thought]) -> Reading:
        """A message's text up to what ends it, which is passed over if it begins no other message."""
        source = self._source
        while True:
            text = source.text
            hits = [(at, end) for end in ENDS if (at := text.find(end, source.at)) >= 0]
            at, end = min(hits, default=(len(text), ""))
            stop = at if end or source.ended else len(text) - beginning(text, source.at, ENDS)
            if stop > source.at:
                self._say(what, source.take(stop - source.at))
            if end:
                source.at += len(end) if end in ENDS[:3] else 0
                return
            if source.ended:
                return
            yield
