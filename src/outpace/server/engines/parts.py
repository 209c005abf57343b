"""From an engine's deltas to an answer's choices, streamed and unstreamed alike.

A ``Part`` is what one choice gained at a time; a ``Whole`` is all parts of a choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outpace.engine.results import TARGET, Delta, Result
from outpace.engine.text import TextReader, TextState
from outpace.exact.sampling import TokenLogprob
from outpace.server.conversation.pieces import Joined, OutputParser, Piece, Plain, ToolStart


@dataclass(slots=True)
class Part:
    """What a choice gained. ``finish``: OpenAI's reason, with the last one; ``stop_reason``: the stop string or token
    id, or "deadline". ``written``: the text's segments with who wrote each, where that was asked for; ``drafted``:
    draft tokens that were verified meanwhile."""

    index: int
    pieces: list[Piece]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    written: Sequence[tuple[str, str]] = ()
    drafted: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    result: Result | None = None


class Colours:
    """Which drafter wrote which part of a choice's text, or the target. ``reader``: of tokens, without stop strings."""

    def __init__(self, reader: TextReader) -> None:
        self._reader, self._state = reader, TextState()
        self._unshown: deque[tuple[str, str]] = deque()  # of tokens whose text may yet be cut off

    def of(self, delta: Delta) -> list[tuple[str, str]]:
        """``(text, source)``: the texts together are the delta's. A token that shows nothing by itself has an empty
        one: a character is credited to the token that ends it."""
        for token, source in zip(delta.token_ids, delta.sources, strict=True):
            self._state, text = self._reader.add(self._state, token)
            self._unshown.append((text, source))
        left, shown = delta.text, []
        while self._unshown and (left or not self._unshown[0][0]):
            text, source = self._unshown.popleft()
            piece, left = left[: len(text)], left[len(text) :]
            shown.append((piece, source))
            if len(piece) < len(text):
                self._unshown.appendleft((text[len(piece) :], source))
        if left:
            shown.append((left, shown[-1][1] if shown else TARGET))
        return shown


@dataclass(slots=True)
class Choice:
    """Makes parts of one sample's deltas. ``colours``: who wrote what, where the request asks for it; ``nothing``: only
    the prompt's log-probabilities are asked for, so generated tokens are left out."""

    index: int
    parser: OutputParser = field(default_factory=Plain)
    colours: Colours | None = None
    nothing: bool = False
    _called: bool = False

    def feed(self, delta: Delta) -> Part:
        """What ``delta`` means."""
        if self.nothing:
            delta = replace(delta, text="", token_ids=(), sources=(), logprobs=())
        pieces = self.parser.feed(delta.text)
        if delta.result is not None:
            pieces = [*pieces, *self.parser.finish()]
        self._called = self._called or any(isinstance(piece, ToolStart) for piece in pieces)
        written = () if self.colours is None else self.colours.of(delta)
        part = Part(self.index, pieces, delta.token_ids, delta.logprobs, delta.prompt_logprobs, written, delta.drafted)
        if delta.result is not None:
            part.result = delta.result
            part.finish, part.stop_reason = self._finish(delta.result)
        return part

    def _finish(self, result: Result) -> tuple[str, str | int | None]:
        if self.nothing:
            return "length", None
        if result.finish_reason == "stop":
            return "tool_calls" if self._called else "stop", result.stopped_by
        return "length", "deadline" if result.finish_reason == "deadline" else None


@dataclass(slots=True)
class Whole:
    """A choice, whole."""

    index: int
    said: Joined = field(default_factory=Joined)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    written: list[tuple[str, str]] = field(default_factory=list)
    drafted: int = 0
    finish: str | None = None
    stop_reason: str | int | None = None
    result: Result | None = None

    def add(self, part: Part) -> None:
        """Take up a part."""
        self.said.add(part.pieces)
        self.token_ids.extend(part.token_ids)
        self.logprobs.extend(part.logprobs)
        self.written.extend(part.written)
        self.drafted += part.drafted
        if part.prompt_logprobs:
            self.prompt_logprobs = part.prompt_logprobs
        if part.result is not None:
            self.finish, self.stop_reason, self.result = part.finish, part.stop_reason, part.result
