"""Which format of calls and reasoning a model writes, by its chat template; reasoning taken off an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from outpace.server.conversation.calls import BareCalls, FencedCalls, TaggedCalls
from outpace.server.conversation.pieces import (
    FIRST,
    SPACE,
    Incremental,
    OutputParser,
    Piece,
    Plain,
    Reading,
    Thought,
)
from outpace.text.chat_template import variables_of

THINK, THINK_END = "<think>", "</think>"
Kind = Literal["llama3", "qwen3", "gemma3", "smollm2", "none"]


@dataclass(frozen=True, slots=True)
class Format:
    """What a template says of its model.

    ``kind``: how calls are written; "none": in no way known here. ``takes_tools``: it puts tools and calls into the
    prompt itself; otherwise messages.py does. ``thinks``: thoughts come before answers; ``may_think``: and a variable
    ``enable_thinking`` says whether.
    """

    kind: Kind
    takes_tools: bool
    thinks: bool
    may_think: bool


@lru_cache(maxsize=64)
def format_of(template: str | None) -> Format:
    """Raises nothing: what cannot be read is of no kind."""
    if template is None:
        return Format("none", False, False, False)
    names = variables_of(template)
    may_think = "enable_thinking" in names
    return Format(_kind(template), "tools" in names, may_think or THINK_END in template, may_think)


def parser_for(
    template: str | None,
    *,
    tools: bool,
    reasoning: bool,
    tool_id: Callable[[int], str],
    prompt: str = "",
    names: Collection[str] | None = None,
    formatted: bool = False,
) -> OutputParser:
    """A parser for one answer.

    ``tools``: look for calls, of ``names`` alone if those are given; ``tool_id``: a call's id from its index.
    ``formatted``: an answer that is no call has a format that was asked for, such as JSON, whose strings may contain
    what begins a call elsewhere.
    ``reasoning``: look for thoughts; ``prompt``: the rendered prompt, which may have begun them.
    """
    found = format_of(template)
    answer: OutputParser = Plain()
    if tools:
        match found.kind:
            case "llama3":
                answer = BareCalls(tool_id, names)
            case "qwen3" | "smollm2":
                answer = TaggedCalls(tool_id, names)
            case "gemma3":
                answer = FencedCalls(tool_id, names)
            case "none":
                pass
        if formatted and found.kind not in ("llama3", "none"):
            answer = CallsOrText(answer)
    if reasoning and found.thinks:
        return ReasoningParser(answer, opened=thoughts_opened(prompt))
    return answer


def thoughts_opened(prompt: str) -> bool:
    """Whether a rendered prompt ends with the mark that begins thoughts."""
    return prompt.rstrip().endswith(THINK)


def thoughts_end(template: str | None, prompt: str) -> str | None:
    """The text after which an answer proper begins, where thoughts may come first: ``after`` of a grammar."""
    if not format_of(template).thinks or prompt.rstrip().endswith(THINK_END):
        return None
    return THINK_END


def _kind(template: str) -> Kind:
    if "<|start_header_id|>" in template or "<|python_tag|>" in template:
        return "llama3"
    if "<start_of_turn>" in template:
        return "gemma3"
    if "<parameter=" in template:  # Qwen 3 Coder's calls, which are no JSON
        return "none"
    if "<tool_call>" in template:
        return "qwen3"
    if "<|im_start|>" in template:  # ChatML without tools of its own: Hermes's way was made for it
        return "smollm2" if "SmolLM" in template else "qwen3"
    return "none"


class CallsOrText:
    """Reads an answer that is calls from its beginning, or text to its end. Calls begin with one of ``FIRST``."""

    def __init__(self, calls: OutputParser) -> None:
        self._calls = calls
        self._held = ""
        self._chosen: OutputParser | None = None

    def feed(self, text: str) -> list[Piece]:
        if self._chosen is None:
            text, self._held = self._held + text, ""
            start = text.lstrip(SPACE)
            if not start:
                self._held = text
                return []
            self._chosen = self._calls if start[0] in FIRST else Plain()
        return self._chosen.feed(text)

    def finish(self) -> list[Piece]:
        if self._chosen is None:
            return Plain().feed(self._held)
        return self._chosen.finish()


class ReasoningParser(Incremental):
    """Takes the reasoning, text in ``<think>`` and ``</think>``, off an answer's beginning; ``answer`` gets the rest.

    ``opened``: the prompt ends with ``<think>``. Line breaks around the reasoning belong to the format.
    """

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
        found = yield from source.literal(THINK)
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
            end = text.find(THINK_END, self._mark)
            stop = end if end >= 0 else len(text)
            if end < 0 and not source.ended:
                n = next((n for n in range(len(THINK_END) - 1, 0, -1) if text.endswith(THINK_END[:n], self._mark)), 0)
                stop -= n
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
            source.at = end + len(THINK_END) if end >= 0 else len(text)
            if end >= 0 or source.ended:
                return
            yield
