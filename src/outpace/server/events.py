"""From an engine's deltas to an answer: the same object feeds streamed and unstreamed ones, so that they are equal.

A ``Part`` is what one choice gained at a time; a ``Whole`` is all of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outpace.engine.results import Delta, Result
from outpace.exact.sampling import TokenLogprob
from outpace.server.sources import Colours
from outpace.server.tools.base import Joined, OutputParser, Piece, Plain, ToolStart


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


@dataclass(slots=True)
class Choice:
    """One sample's way from deltas to parts. ``colours``: of who wrote what, where that was asked for; ``nothing``:
    only the prompt was asked about, so that what was generated is left out."""

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
    """All that a choice said."""

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
