"""Calls as Llama 3.1 to 3.3 write them: the whole answer is a JSON object, with ``parameters``; several have ``;``
between them. ``<|python_tag|>`` may stand before them, and ``<function=name>{...}</function>`` is the older spelling.
"""

from __future__ import annotations

from outpace.server.tools.base import Reading
from outpace.server.tools.calls import ObjectCalls
from outpace.server.tools.values import Reads, value

TAG, FUNCTION, END = "<|python_tag|>", "<function=", "</function>"
LONGEST_NAME = 64


class BareCalls(ObjectCalls):
    """Calls without any mark are looked for where an answer begins, and after other calls."""

    def _read(self) -> Reading:
        self._mark = 0
        yield from self._objects()
        self._settle(False, ";")
        while opening := (yield from self._until((TAG, FUNCTION))):
            if opening == FUNCTION:
                self._settle((yield from self._function()), END)
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
        return (yield from source.literal(END))
