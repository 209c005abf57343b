"""The items of ``/v1/responses``: a conversation's, made a chat's messages; and an answer's, whole and as events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from outpace.server.api.answers import ChosenToken
from outpace.server.conversation.messages import FunctionCall, Message, TextPart, ToolCall
from outpace.server.conversation.pieces import Piece, Reasoning, Text, ToolStart
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items

Status = Literal["in_progress", "completed", "incomplete"]


class Part(Body):
    """Text. Answers' parts may be sent back as they came: ``annotations`` and ``logprobs`` change nothing."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Any] | None = None
    parsed: Any = None


class InputItem(Body):
    """Of a conversation. Answers' items may be sent back as they came: ``id`` and ``status`` change nothing."""

    id: str | None = None
    status: Status | None = None


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[Part]


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    parsed_arguments: Any = None


class CallOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[Part]


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    summary: Items[SummaryText]
    content: Items[ReasoningText] | None = None


def kind_of(item: Any) -> str | None:
    """The tag of an item's branch in a union: its type, with capitals, which no field's name has."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind.title() if isinstance(kind, str) else None


AnyItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Function_Call")]
    | Annotated[CallOutputItem, Tag("Function_Call_Output")]
    | Annotated[ReasoningItem, Tag("Reasoning")],
    Discriminator(
        kind_of,
        custom_error_type="item_type",
        custom_error_message="is of no type that is supported: "
        "give a message, function_call, function_call_output or reasoning",
    ),
]


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """A chat's messages. Reasoning, text and calls that follow one another are one message of the assistant's.

    Raises APIError for an output without its call.
    """
    found: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}  # the assistant's message that goes on; empty: none does
    open_calls: set[str] = set()

    def assistants(*over: str) -> dict[str, Any]:
        """The assistant's message that the next item belongs to: a new one where this one has one of ``over``."""
        nonlocal answer
        if not answer or any(name in answer for name in over):
            answer = {"role": "assistant"}
            found.append(answer)
        return answer

    for i, item in enumerate(items):
        match item:
            case ReasoningItem():
                texts = [part.text for part in item.content or item.summary]
                assistants("reasoning_content", "content", "tool_calls")["reasoning_content"] = "\n".join(texts)
                open_calls = set()
            case MessageItem(role="assistant"):
                assistants("content", "tool_calls")["content"] = _content(item.content)
                open_calls = set()
            case MessageItem():
                answer, open_calls = {}, set()
                found.append({"role": item.role, "content": _content(item.content)})
            case CallItem():
                function = FunctionCall(name=item.name, arguments=item.arguments)
                calls = assistants().setdefault("tool_calls", [])
                calls.append(ToolCall(id=item.call_id, type="function", function=function))
                open_calls.add(item.call_id)
            case CallOutputItem():
                if item.call_id not in open_calls:
                    raise APIError(
                        400, f"input.{i}.call_id={item.call_id!r} answers no function_call right before it: give the "
                        "call_id of one", param=f"input.{i}.call_id",
                    )  # fmt: skip
                answer = {}
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    for message in found:
        message.setdefault("content", None if "tool_calls" in message else "")
    return [Message(**message) for message in found]


def _content(content: str | Sequence[Part]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart(type="text", text=part.text) for part in content]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class OutputReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


class OutputReasoning(Answer):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputReasoningText]
    status: Status


class OutputCall(Answer):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall
_Start = type[Text] | type[Reasoning] | ToolStart


class Event(Answer):
    type: str
    sequence_number: int
    token_ids: list[int] | None = Field(default=None, description="That came since the last event that has some.")


class ItemEvent(Event):
    output_index: int
    item: OutputItem


class PartEvent(Event):
    output_index: int
    item_id: str
    content_index: int
    part: OutputText | OutputReasoningText


class DeltaEvent(Event):
    output_index: int
    item_id: str
    content_index: int | None = None
    delta: str
    logprobs: list[ChosenToken] | None = None


class DoneEvent(Event):
    output_index: int
    item_id: str
    content_index: int | None = None
    text: str | None = None
    logprobs: list[ChosenToken] | None = None
    arguments: str | None = None
    name: str | None = None


_NAMES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Output:
    """An answer's items: its reasoning, its text, its calls, in the order in which they came. Streamed and unstreamed
    answers are made here. ``key``: what the items' ids have in common; ``numbers``: of events."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.numbers = count()
        self.items: list[OutputItem] = []
        self._open = False  # whether more of the last item may come
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[ChosenToken] = []  # of the open item
        self._ahead: list[ChosenToken] = []  # of tokens that belong to text that has not come yet

    @property
    def reasoning(self) -> str:
        """All of the reasoning."""
        found = [part.text for item in self.items if isinstance(item, OutputReasoning) for part in item.content]
        return "".join(found)

    def feed(self, pieces: Iterable[Piece], logprobs: Sequence[ChosenToken] = ()) -> list[Event]:
        """Events of what came: neighbouring pieces of a kind are one."""
        events: list[Event] = []
        self._ahead.extend(logprobs)
        for piece in pieces:
            if isinstance(piece, ToolStart):
                events += [*self._end("completed"), *self._begin(piece)]
                continue
            kind = {Text: "message", Reasoning: "reasoning"}.get(type(piece), "function_call")
            if not self._open or self.items[-1].type != kind:
                assert isinstance(piece, (Text, Reasoning)), "arguments of no call"
                events += [*self._end("completed"), *self._begin(type(piece))]
            last = events[-1] if events else None
            if isinstance(last, DeltaEvent) and last.output_index == len(self.items) - 1:
                last.delta += piece.text
                self._texts.append(piece.text)
            else:
                events.append(self._delta(piece.text))
        return events

    def finish(self, status: Status) -> list[Event]:
        """Nothing more comes; ``status``: of the last item. An answer that says nothing has an empty text."""
        events: list[Event] = []
        if all(isinstance(item, OutputReasoning) for item in self.items):
            events += [*self._end("completed"), *self._begin(Text)]
        if self._open and isinstance(self.items[-1], OutputMessage) and self._ahead:
            events.append(self._delta(""))
        return [*events, *self._end(status)]

    def _begin(self, start: _Start) -> list[Event]:
        kind = "function_call" if isinstance(start, ToolStart) else "message" if start is Text else "reasoning"
        shared: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{self._key}{len(self.items):02x}", "status": "in_progress"}
        item: OutputItem
        if isinstance(start, ToolStart):
            item = OutputCall(type="function_call", call_id=start.id, name=start.name, arguments="", **shared)
        elif start is Text:
            item = OutputMessage(type="message", role="assistant", content=[], **shared)
        else:
            item = OutputReasoning(type="reasoning", summary=[], content=[], **shared)
        self.items.append(item)
        self._open, self._texts, self._logprobs = True, [], []
        events: list[Event] = [ItemEvent(**self._place("output_item.added"), item=item)]
        if not isinstance(item, OutputCall):
            events.append(PartEvent(**self._place("content_part.added", part=True), part=self._part("")))
        return events

    def _delta(self, text: str) -> DeltaEvent:
        kind = self.items[-1].type
        self._texts.append(text)
        event = DeltaEvent(**self._place(f"{_NAMES[kind]}.delta", part=True), delta=text)
        if kind == "message":
            event.logprobs, self._ahead = self._ahead, []
            self._logprobs += event.logprobs
        return event

    def _end(self, status: Status) -> list[Event]:
        """Events of the open item's end: it has its text from now on."""
        if not self._open:
            return []
        item, text = self.items[-1], "".join(self._texts)
        done: dict[str, Any] = self._place(f"{_NAMES[item.type]}.done", part=True)
        events: list[Event]
        if isinstance(item, OutputCall):
            changed: dict[str, Any] = {"arguments": text}
            events = [DoneEvent(**done, arguments=text, name=item.name)]
        else:
            changed = {"content": [self._part(text)]}
            if isinstance(item, OutputMessage):
                done["logprobs"] = self._logprobs
            events = [
                DoneEvent(**done, text=text),
                PartEvent(**self._place("content_part.done", part=True), part=changed["content"][0]),
            ]
        self.items[-1] = item.model_copy(update={**changed, "status": status})
        self._open = False
        return [*events, ItemEvent(**self._place("output_item.done"), item=self.items[-1])]

    def _place(self, name: str, *, part: bool = False) -> dict[str, Any]:
        """The first fields of an event. ``part``: it is of a part of the item."""
        fields = {
            "type": f"response.{name}", "sequence_number": next(self.numbers), "output_index": len(self.items) - 1
        }  # fmt: skip
        if part:
            fields["item_id"] = self.items[-1].id
            if not isinstance(self.items[-1], OutputCall):
                fields["content_index"] = 0
        return fields

    def _part(self, text: str) -> OutputText | OutputReasoningText:
        if isinstance(self.items[-1], OutputReasoning):
            return OutputReasoningText(type="reasoning_text", text=text)
        return OutputText(type="output_text", text=text, annotations=[], logprobs=list(self._logprobs))
