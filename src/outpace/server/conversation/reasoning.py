"""Reasoning taken off an answer's beginning."""

from __future__ import annotations

from outpace.server.conversation.pieces import Incremental, OutputParser, Piece, Reading, Thought, beginning

# What begins and ends reasoning: of DeepSeek, Qwen, GLM, MiniMax and most others; Mistral; Gemma 4; Seed-OSS; Cohere.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>", "</mm:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
)


def marks_in(text: str) -> tuple[str, str] | None:
    """Those that a template's source has, or what it writes."""
    return next((marks for marks in MARKS if marks[1] in text), None)


class ReasoningParser(Incremental):
    """Takes the reasoning, text between ``marks``, off an answer's beginning; ``answer`` gets the rest.

    ``opened``: the prompt ends with the first mark. Line breaks around the reasoning belong to the format.
    """

    def __init__(self, answer: OutputParser, marks: tuple[str, str], *, opened: bool = False) -> None:
        super().__init__()
        self._answer, self._opened = answer, opened
        self._begin, self._end = marks
        self._answering = False

    def feed(self, text: str) -> list[Piece]:
        return self._answer.feed(text) if self._answering else super().feed(text)

    def finish(self) -> list[Piece]:
        return [*([] if self._answering else super().finish()), *self._answer.finish()]

    def _read(self) -> Reading:
        source = self._source
        self._mark = 0
        yield from source.spaces()
        found = yield from source.literal(self._begin)
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
            end = text.find(self._end, self._mark)
            stop = end if end >= 0 else len(text)
            if end < 0 and not source.ended:
                stop -= beginning(text, self._mark, (self._end,))
            shown = text[self._mark : stop]
            if not begun:
                self._mark += len(shown) - len(shown.lstrip("\n"))
                shown = shown.lstrip("\n")
            if end >= 0 or not source.ended:
                shown = shown.rstrip("\n")
            if shown:
                begun = True
                self._say(Thought, shown)
                self._mark += len(shown)
            source.at = end + len(self._end) if end >= 0 else len(text)
            if end >= 0 or source.ended:
                return
            yield


class Unframed(Incremental):
    """Takes ``marks`` out of an answer; ``answer`` gets the rest."""

    def __init__(self, answer: OutputParser, marks: tuple[str, ...]) -> None:
        super().__init__()
        self._answer, self._marks = answer, marks

    def finish(self) -> list[Piece]:
        return [*super().finish(), *self._answer.finish()]

    def _read(self) -> Reading:
        source = self._source
        while True:
            hits = [(at, mark) for mark in self._marks if (at := source.text.find(mark, source.at)) >= 0]
            end, mark = min(hits, default=(len(source.text), ""))
            if not mark and not source.ended:
                end -= beginning(source.text, source.at, self._marks)
            self._pieces += self._answer.feed(source.take(end - source.at))
            source.at += len(mark)
            if not mark:
                if source.ended:
                    return
                yield
