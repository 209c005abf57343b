"""What an answer is made of, as events; and how its text is read piece by piece, however it was cut on the way.

A parser is a generator over characters: it sees one at a time, and waits where there is none yet. So what it says
cannot depend on how the text was split. What may yet become a call is held back; what turns out to be none is text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, Protocol

Reading = Generator[None, None, None]  # waits for text at every yield
SPACE = " \t\r\n"
WIDEST_GAP = 64  # characters of white space that may belong to a format; of more, the first are text


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins. ``index``: which of the answer's calls; ``id``: as the caller names calls."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of a call's arguments, JSON text."""

    index: int
    text: str


Piece = Text | Thought | ToolStart | ToolArguments


ToolId = Callable[[int], str]
Schemas = Mapping[str, Any] | None
What = type[Text] | type[Thought] | int  # the last: arguments of this call


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an answer that is of one kind: a text, a thought, or a call, whose text is its arguments' JSON.
    ``number``: which of the answer's segments; of a call, ``call``: which of its calls, ``id`` and ``name``."""

    kind: Literal["text", "thought", "call"]
    number: int
    call: int = 0
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    segment: Segment


@dataclass(frozen=True, slots=True)
class More:
    """More of the segment that began last."""

    segment: Segment
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more of the segment comes: the next one begins, or the answer has ended."""

    segment: Segment


Event = Begin | More | End


class Segmenter:
    """Makes events of an answer's pieces."""

    def __init__(self) -> None:
        self._open: Segment | None = None

    def feed(self, pieces: Iterable[Piece], *, last: bool = False) -> list[Event]:
        """``last``: the answer ends with them."""
        events: list[Event] = []
        segment = self._open
        for piece in pieces:
            number = 0 if segment is None else segment.number + 1
            if isinstance(piece, ToolStart):
                new = Segment("call", number, piece.index, piece.id, piece.name)
            elif isinstance(piece, ToolArguments):
                assert segment is not None, "arguments of no call"
                new = segment
            else:
                kind: Literal["text", "thought"] = "text" if isinstance(piece, Text) else "thought"
                new = segment if segment is not None and segment.kind == kind else Segment(kind, number)
            if new is not segment:
                events += [Begin(new)] if segment is None else [End(segment), Begin(new)]
                segment = new
            if not isinstance(piece, ToolStart):
                events.append(More(new, piece.text))
        if last and segment is not None:
            events.append(End(segment))
        self._open = segment
        return events


class OutputParser(Protocol):
    """Takes an answer's text apart. The joined pieces are the same under every split of the text; nothing raises."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back. Nothing may be fed afterwards."""


@dataclass(slots=True)
class Call:
    """A whole call. ``arguments``: JSON text; cut off, or followed by text, where the answer's call was broken."""

    id: str
    name: str
    arguments: str = ""

    @property
    def whole(self) -> bool:
        """Whether the arguments are a JSON object: the answer did not end within them."""
        return json_object(self.arguments) is not None


def json_object(text: str) -> dict[str, Any] | None:
    """The object that ``text`` is in JSON; None where it is none. Escapes of half a pair stand for no character, and
    numbers that are too large stay as they are written."""
    try:
        found = json.loads(_ESCAPE.sub(_whole, text), parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


_ESCAPE = re.compile(r"\\(u[dD][89abAB]..\\u[dD][c-fC-F]..|u[dD][89a-fA-F]..|.)", re.DOTALL)


def _whole(escape: re.Match[str]) -> str:
    return "\\ufffd" if len(escape[0]) == 6 else escape[0]


def _finite(number: str) -> float | str:
    found = float(number)
    return found if isfinite(found) else number


@dataclass(slots=True)
class Joined:
    """Events put together: what an answer says, or the part of it that they are of. ``texts``: by segment."""

    texts: dict[Segment, list[str]] = field(default_factory=dict)

    def add(self, events: Iterable[Event]) -> None:
        """What follows. A segment may have begun before."""
        for event in events:
            if isinstance(event, Begin):
                self.texts[event.segment] = []
            elif isinstance(event, More):
                self.texts.setdefault(event.segment, []).append(event.text)

    @property
    def text(self) -> str:
        return self._of("text")

    @property
    def thoughts(self) -> str:
        return self._of("thought")

    def _of(self, kind: str) -> str:
        return "".join(text for segment, texts in self.texts.items() if segment.kind == kind for text in texts)

    @property
    def calls(self) -> list[Call]:
        calls = ((segment, texts) for segment, texts in self.texts.items() if segment.kind == "call")
        return [Call(segment.id, segment.name, "".join(texts)) for segment, texts in calls]


class Plain:
    """An answer that is text and nothing else."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Characters:
    """Text that arrives in parts, read a character at a time."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    @property
    def ended_here(self) -> bool:
        return self.ended and self.at == len(self.text)

    def peek(self, ahead: int = 0) -> Generator[None, None, str]:
        """The next character, or one ``ahead`` of it; it stays. "" at the end."""
        while self.at + ahead >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at + ahead]

    def take(self, n: int = 1) -> str:
        """Pass over n characters that were peeked at (fewer at the end)."""
        taken = self.text[self.at : self.at + n]
        self.at += len(taken)
        return taken

    def spaces(self, which: str = SPACE) -> Reading:
        """Pass over white space."""
        while (c := (yield from self.peek())) and c in which:
            self.at += 1

    def literal(self, expected: str) -> Generator[None, None, bool]:
        """Pass over ``expected``, or up to where the text differs."""
        for character in expected:
            if (yield from self.peek()) != character:
                return False
            self.at += 1
        return True


class Incremental(ABC):
    """An ``OutputParser`` from a generator, ``_read``, that calls ``_emit``.

    ``_mark``: where in the source that begins which is still undecided; None: everything read was taken.
    """

    def __init__(self) -> None:
        self._source = Characters()
        self._pieces: list[Piece] = []
        self._what: What = Text
        self._run: list[str] = []  # the piece that is being put together, of kind ``_what``
        self._mark: int | None = None
        self._reading = self._read()

    def feed(self, text: str) -> list[Piece]:
        source = self._source
        done = source.at if self._mark is None else min(self._mark, source.at)
        source.text, source.at = source.text[done:] + text, source.at - done
        if self._mark is not None:
            self._mark -= done
        next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Piece]:
        self._source.ended = True
        next(self._reading, None)
        return self._taken()

    @abstractmethod
    def _read(self) -> Reading:
        """Take the text as it comes, and emit pieces; yields where it needs more."""

    def _taken(self) -> list[Piece]:
        """What was emitted since the last time."""
        self._flush()
        found, self._pieces = self._pieces, []
        return found

    def _emit(self, piece: Piece) -> None:
        self._flush()
        self._pieces.append(piece)

    def _say(self, what: What, text: str) -> None:
        """More of a text: what follows one another becomes one piece."""
        if what != self._what:
            self._flush()
            self._what = what
        self._run.append(text)

    def _flush(self) -> None:
        text = "".join(self._run)
        if text:
            if isinstance(self._what, int):
                self._pieces.append(ToolArguments(self._what, text))
            else:
                self._pieces.append(self._what(text))
        self._run.clear()


class CallParser(Incremental):
    """What the formats of calls share: text between calls, and calls that turn out to be text.

    ``tool_id``: a call's id from its index. ``schemas``: of the arguments of the tools there are, by name; a call of
    another stays text. None: any. ``openings``: what begins calls within a text.
    White space between text and a call, between calls, and after the last one belongs to the format.
    """

    openings: tuple[str, ...] = ()

    def __init__(self, tool_id: ToolId, schemas: Schemas = None) -> None:
        super().__init__()
        self._tool_id, self._schemas = tool_id, schemas
        self._calls = 0
        self._after_call = False  # nothing but white space since

    def _known(self, name: str) -> bool:
        return bool(name) and (self._schemas is None or name in self._schemas)

    def _start(self, name: str) -> None:
        """A call is certain."""
        self._emit(ToolStart(self._calls, self._tool_id(self._calls), name))
        self._calls += 1
        self._mark = None

    def _argue(self, text: str) -> None:
        self._say(self._calls - 1, text)

    def _keep(self) -> None:
        """What was undecided is text."""
        if self._mark is not None and self._mark < self._source.at:
            self._say(Text, self._source.text[self._mark : self._source.at])
            self._after_call = False
        self._mark = None

    def _settle(self, ended: bool, closing: str = "") -> None:
        """Calls ended in their format, or stopped being calls. At the answer's end some of ``closing`` may be missing.

        White space after calls stays undecided: it is text if text follows.
        """
        undecided = "" if self._mark is None else self._source.text[self._mark : self._source.at].strip(SPACE)
        if ended or (self._after_call and self._source.ended_here and closing.startswith(undecided)):
            self._mark, self._after_call = None, True
        elif undecided:
            self._keep()

    def _until(self, openings: tuple[str, ...]) -> Generator[None, None, str]:
        """Text up to the first of ``openings``, which is passed over and undecided; "" at the answer's end."""
        source = self._source
        if self._mark is None:
            self._mark = source.at
        while True:
            text = source.text
            hits = [(at, o) for o in openings if (at := text.find(o, self._mark)) >= 0]
            end, opening = min(hits, default=(len(text), ""))
            if not opening and not source.ended:
                end -= beginning(text, self._mark, openings)
            begin = self._mark
            shown = max(begin + len(text[begin:end].rstrip(SPACE)), end - WIDEST_GAP)
            if shown > begin:
                source.at = shown
                self._keep()
                self._mark = shown
            source.at = end + len(opening) if opening else len(text)
            if opening:
                return opening
            if source.ended:
                if self._after_call and not text[self._mark :].strip(SPACE):
                    self._mark = None
                self._keep()
                return ""
            yield


def beginning(text: str, start: int, openings: tuple[str, ...]) -> int:
    """Length of the longest end of ``text``, from ``start`` on, that begins one of ``openings``."""
    for n in range(min(max(map(len, openings)) - 1, len(text) - start), 0, -1):
        if any(opening.startswith(text[-n:]) for opening in openings):
            return n
    return 0
