"""What a model thinks before it answers: text in ``<think>`` and ``</think>``, where an answer begins.

Line breaks around the thoughts belong to the format.
"""

from __future__ import annotations

from outpace.server.tools.base import Incremental, OutputParser, Piece, Reading, Reasoning

OPEN, CLOSE = "<think>", "</think>"


class ReasoningParser(Incremental):
    """Takes thoughts off the beginning and gives the rest to ``answer``. ``opened``: the prompt has opened them."""

    def __init__(self, answer: OutputParser, *, opened: bool = False) -> None:
        super().__init__()
        self._answer, self._opened = answer, opened
        self._answering = False

    def feed(self, text: str) -> list[Piece]:
        return self._answer.feed(text) if self._answering else super().feed(text)

    def finish(self) -> list[Piece]:
        return [*([] if self._answering else super().finish()), *self._answer.finish()]

    def _read(self) -> Reading:
        source = self._source
        self._mark = 0
        yield from source.spaces()
        found = yield from source.literal(OPEN)
        if found or self._opened:
            if found:
                self._mark = source.at
            yield from self._thoughts()
            self._mark = source.at
            yield from source.spaces("\n")
            self._mark = source.at
        self._answering = True
        assert self._mark is not None
        self._flush()
        self._pieces += self._answer.feed(source.text[self._mark :])
        source.at = len(source.text)

    def _thoughts(self) -> Reading:
        """From ``_mark`` up to the closing tag, which is passed over, or the answer's end."""
        source, begun = self._source, False
        while True:
            assert self._mark is not None
            text = source.text
            end = text.find(CLOSE, self._mark)
            stop = end if end >= 0 else len(text)
            if end < 0 and not source.ended:
                n = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n], self._mark)), 0)
                stop -= n
            shown = text[self._mark : stop]
            if not begun:
                self._mark += len(shown) - len(shown.lstrip("\n"))
                shown = shown.lstrip("\n")
            if end >= 0 or not source.ended:
                shown = shown.rstrip("\n")
            if shown:
                begun = True
                self._say(Reasoning, shown)
                self._mark += len(shown)
            source.at = end + len(CLOSE) if end >= 0 else len(text)
            if end >= 0 or source.ended:
                return
            yield
