"""Calls as Hermes and Qwen 3 write them: JSON objects in ``<tool_call>`` and ``</tool_call>``, one or several."""

from __future__ import annotations

from outpace.server.tools.base import Reading
from outpace.server.tools.calls import ObjectCalls
from outpace.server.tools.values import Reads

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TaggedCalls(ObjectCalls):
    """Text with tagged calls in it. A tag may hold one object, several, or a list of them (SmolLM2)."""

    def _read(self) -> Reading:
        while (yield from self._until((OPEN,))):
            self._settle((yield from self._tagged()), CLOSE)

    def _tagged(self) -> Reads:
        """What follows an opening tag, up to the closing one or the answer's end."""
        source = self._source
        yield from source.spaces()
        while True:
            if not (yield from self._calls_at()):
                return False
            yield from source.spaces()
            if (yield from source.peek()) == "<":
                return (yield from source.literal(CLOSE))
