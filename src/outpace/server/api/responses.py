"""``POST /v1/responses``: a chat whose messages and answer are items."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from outpace.server.api import chat
from outpace.server.api.answers import ChosenToken, chosen_tokens
from outpace.server.api.chat import ChatRequest
from outpace.server.api.formats import JsonSchema, ResponseFormat
from outpace.server.api.prompt import Effort
from outpace.server.api.route import STREAMED, Encoder, Route, answered, event, service_of
from outpace.server.api.sampling import Parameters
from outpace.server.conversation.messages import FunctionCall, Message, ToolCall, kind_of, parts_of
from outpace.server.conversation.pieces import Begin, End, More, Segment
from outpace.server.conversation.tools import MOST_TOOLS, Function, NamedFunction, NamedTool, Tool
from outpace.server.engines.generation import Generation, Part, PromptProgress, Speculation, Work, usage
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items, only

router = APIRouter(route_class=Route)

# -- items ------------------------------------------------------------------------------------------------------------
# A conversation's, made a chat's messages; and an answer's.

Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Body):
    """Text. Answers' parts may be sent back as they came: ``annotations`` and ``logprobs`` change nothing."""

    type: Annotated[Literal["input_text", "output_text"], only("input_text", "output_text")]
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
    content: str | Items[InputPart]


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str
    parsed_arguments: Any = None


class CallOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[InputPart]


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
                assistants("content", "tool_calls")["content"] = parts_of(item.content)
                open_calls = set()
            case MessageItem():
                answer, open_calls = {}, set()
                found.append({"role": item.role, "content": parts_of(item.content)})
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
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": parts_of(item.output)})
    for message in found:
        message.setdefault("content", None if "tool_calls" in message else "")
    return [Message(**message) for message in found]


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


_PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}
_KINDS = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}  # in events' names


# -- requests and responses ------------------------------------------------------------------------------------------

NAMES = {  # of fields of chats', as here
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


# Tools that other servers run themselves, or group: a model that is not told of them calls none of them.
ELSEWHERE = frozenset((
    "code_interpreter", "computer_use_preview", "custom", "file_search", "image_generation", "local_shell", "mcp",
    "namespace", "shell", "web_search", "web_search_preview",
))  # fmt: skip


def _functions(value: Any) -> Any:
    return (
        [tool for tool in value if not (isinstance(tool, dict) and tool.get("type") in ELSEWHERE)]
        if isinstance(value, list)
        else value
    )


class FunctionTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
            raise ValueError(f"{kind!r} is not supported: this server runs no tools of its own; give functions")
        return value


class NamedFunctionTool(NamedFunction):
    type: Literal["function"]


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextOptions(Body):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="Changes nothing.")


_Summary = Literal["auto", "concise", "detailed"]


class ReasoningWish(Body):
    effort: Effort | None = None
    summary: _Summary | None = Field(default=None, description="Changes nothing: answers have the reasoning itself.")
    generate_summary: _Summary | None = Field(default=None, description="Its older name.")


class Obfuscation(Body):
    include_obfuscation: Literal[False] | None = None


def _without_own_tools(value: Any) -> Any:
    items = value if isinstance(value, list) else ()
    if any(isinstance(item, dict) and item.get("type") == "additional_tools" for item in items):
        raise APIError(
            400, "input has additional_tools, in which Codex describes its tools to OpenAI's own models alone: start it"
            " with the name of a model that is served (codex -m NAME), and it sends functions", param="input",
        )  # fmt: skip
    return value


class ResponsesRequest(Parameters):
    input: Annotated[str | Items[AnyItem], BeforeValidator(_without_own_tools)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[
        Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None,
        BeforeValidator(_functions),
        Field(description="Functions; those that a server would run itself are left out of what the model is told."),
    ] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningWish | None = None
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the model's template.")
    metadata: dict[str, str] | None = Field(default=None, max_length=16, description="The answer has it, too.")
    stream_options: Obfuscation | None = None
    truncation: Literal["disabled"] | None = None

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())


class ResponseError(Answer):
    code: str
    message: str


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class CachedTokens(Answer):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    speculation: Speculation


class ToolOfAnswer(Answer):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None
    strict: bool


class ReasoningOptions(Answer):
    effort: Effort | None
    summary: None


class ResponseObject(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningOptions
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextOptions
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool
    tools: list[ToolOfAnswer]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    system_fingerprint: str
    seed: int | None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class ResponseEvent(Event):
    response: ResponseObject
    prompt_progress: PromptProgress | None = Field(default=None, description="How much of the prompt was read.")


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
async def responses(request: Request, body: ResponsesRequest) -> Answer | Response:
    """Answer text, or a conversation of items."""

    def work(model: Served, scope: str) -> Work:
        return chat.work(as_chat(body), service_of(request).settings, model, scope)

    return await answered(request, body, ResponseEncoder, work, model=body.model, streamed=bool(body.stream))


@router.post("/v1/responses/input_tokens", response_model=chat.InputTokens)
async def input_tokens(request: Request, body: ResponsesRequest) -> chat.InputTokens:
    """How many tokens the input has, instructions and tools included."""
    count = await chat.counted(request, as_chat(body), body.model)
    return chat.InputTokens(object="response.input_tokens", input_tokens=count)


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that ``body`` asks for. Raises APIError for what means nothing."""
    if body.traced:
        raise APIError(
            400, "speculation.trace is not supported here: ask /v1/chat/completions", param="speculation.trace"
        )
    if body.top_logprobs and not body.logprobs:
        raise APIError(400, f'top_logprobs needs include: give ["{_LOGPROBS}"]', param="top_logprobs")
    if body.logprobs and body.tools and body.tool_choice != "none":
        raise APIError(
            400, "log-probabilities are of text, and tools may be called instead: leave include or tools out, or ask "
            "/v1/chat/completions", param="include",
        )  # fmt: skip
    choice = body.tool_choice
    return chat.asked(
        **{name: getattr(body, name) for name in Parameters.model_fields},
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=choice if choice is None or isinstance(choice, str) else _named(choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _messages(body: ResponsesRequest) -> list[Message]:
    system = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*system, Message(role="user", content=body.input)]
    if not body.input:
        raise APIError(400, "input is empty: give some text, or items", param="input")
    return [*system, *messages_of(body.input)]


def _tool(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}, exclude_none=True)))


def _named(choice: NamedFunctionTool) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=choice.name))


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, SchemaFormat):
        schema = JsonSchema(**wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"}))
        return ResponseFormat(type="json_schema", json_schema=schema)
    return None if wanted is None else ResponseFormat(type=wanted.type)


class ResponseEncoder(Encoder):
    """A response: its items are the segments. An answer that is nothing but thoughts has an empty text."""

    prefix, names = "resp_", NAMES
    body: ResponsesRequest

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        super().__init__(generation, body)
        self._key = generation.id.partition("_")[2]  # what the items' ids have in common
        self._numbers = count()  # of events
        self._logprobs: list[ChosenToken] = []
        self._sent = 0  # of them: the others wait for text
        self._unsent: list[int] = []  # token ids that no event has brought yet
        for part in generation.resumed.values():
            self.part(part)
        self._unsent.clear()

    def fold(self, part: Part) -> None:
        super().fold(part)
        if self.body.logprobs:
            self._logprobs += chosen_tokens(part.logprobs, self.body.top_logprobs or 0, self.generation.model)

    def begin(self) -> bytes:
        begun = self._response("in_progress")
        names = () if self.generation.resumed else ("created", "in_progress")
        return b"".join(self._event(begun, name) for name in names)

    @property
    def shows_progress(self) -> bool:
        return bool(self.body.return_progress)

    def progress(self) -> bytes:
        """A response in progress once more, which clients know."""
        return self._event(self._response("in_progress"), prompt_progress=self.generation.progress)

    def part(self, part: Part) -> bytes:
        self.fold(part)
        last = None if part.result is None else [*self._texts()][-1]
        events: list[Event] = []
        for each in part.events:
            match each:
                case Begin(segment):
                    events += self._begun(segment)
                case More(segment, text):
                    if events and isinstance(events[-1], DeltaEvent):
                        events[-1].delta += text
                    else:
                        events.append(self._delta(segment, text))
                case End(segment) if segment != last:
                    events += self._ended(segment, "completed")
        if last is not None:
            if last not in self.only.joined.texts:
                events += self._begun(last)
            if last.kind == "text" and self._sent < len(self._logprobs):
                events.append(self._delta(last, ""))
            events += self._ended(last, self._status)
        self._unsent.extend(part.token_ids)
        if events and self.body.return_token_ids:
            events[-1].token_ids, self._unsent = self._unsent, []
        return b"".join(event(each.to_json(), each.type) for each in events)

    def end(self) -> bytes:
        return self._event(self.whole())

    def failed(self, error: APIError) -> bytes:
        why = ResponseError(code=error.code or "server_error", message=error.message)
        return self._event(self._response("failed", error=why, output=self._items("incomplete")))

    def whole(self) -> ResponseObject:
        generation, cost, choice = self.generation, usage(self.generation), self.only
        assert choice.result is not None
        thoughts = choice.joined.thoughts
        tokens = len(generation.model.tokenizer.encode(thoughts, add_special=False)) if thoughts else 0
        cached = cost.prompt_tokens_details.cached_tokens
        more: dict[str, Any] = {}
        if self.body.return_token_ids:
            more["prompt_token_ids"] = generation.work.prompts[0].tolist()
            more["token_ids"] = list(choice.result.token_ids)
        status = self._status
        return self._response(
            status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            output=self.items(),
            stop_reason=choice.stop_reason,
            usage=ResponseUsage(
                input_tokens=cost.prompt_tokens,
                input_tokens_details=CachedTokens(
                    cached_tokens=cached,
                    cache_write_tokens=0 if self.body.reuse_prefix is False else cost.prompt_tokens - cached,
                ),
                output_tokens=cost.completion_tokens,
                output_tokens_details=ReasoningTokens(reasoning_tokens=tokens),
                total_tokens=cost.total_tokens,
                speculation=cost.speculation,
            ),
            **more,
        )

    def items(self) -> list[OutputItem]:
        """Of the whole answer."""
        return self._items(self._status)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        """At the answer's end."""
        return "incomplete" if self.only.finish == "length" else "completed"

    def _texts(self) -> dict[Segment, str]:
        """By segment, with the empty text where there are only thoughts."""
        texts = {segment: "".join(parts) for segment, parts in self.only.joined.texts.items()}
        if all(segment.kind == "thought" for segment in texts):
            texts[Segment("text", len(texts))] = ""
        return texts

    def _items(self, last: Status) -> list[OutputItem]:
        """``last``: the status of the last one."""
        texts = self._texts()
        end = len(texts) - 1
        return [
            self._item(segment, text, last if segment.number == end else "completed") for segment, text in texts.items()
        ]

    def _item(self, segment: Segment, text: str | None, status: Status) -> OutputItem:
        """``text``: None where none has come."""
        shared: dict[str, Any] = {"id": self._id(segment), "status": status}
        if segment.kind == "call":
            return OutputCall(
                type="function_call", call_id=segment.id, name=segment.name, arguments=text or "", **shared
            )
        content: list[Any] = [] if text is None else [self._content(segment, text, self._logprobs)]
        if segment.kind == "thought":
            return OutputReasoning(type="reasoning", summary=[], content=content, **shared)
        return OutputMessage(type="message", role="assistant", content=content, **shared)

    def _content(self, segment: Segment, text: str, logprobs: list[ChosenToken]) -> OutputText | OutputReasoningText:
        if segment.kind == "thought":
            return OutputReasoningText(type="reasoning_text", text=text)
        return OutputText(type="output_text", text=text, annotations=[], logprobs=list(logprobs))

    def _id(self, segment: Segment) -> str:
        return f"{_PREFIXES[segment.kind]}_{self._key}{segment.number:02x}"

    def _begun(self, segment: Segment) -> list[Event]:
        item = self._item(segment, None, "in_progress")
        events: list[Event] = [ItemEvent(**self._place("output_item.added", segment), item=item)]
        if segment.kind != "call":
            place = self._place("content_part.added", segment, part=True)
            events.append(PartEvent(**place, part=self._content(segment, "", [])))
        return events

    def _delta(self, segment: Segment, text: str) -> DeltaEvent:
        delta = DeltaEvent(**self._place(f"{_KINDS[segment.kind]}.delta", segment, part=True), delta=text)
        if segment.kind == "text":
            delta.logprobs, self._sent = self._logprobs[self._sent :], len(self._logprobs)
        return delta

    def _ended(self, segment: Segment, status: Status) -> list[Event]:
        text = self._texts()[segment]
        done: dict[str, Any] = self._place(f"{_KINDS[segment.kind]}.done", segment, part=True)
        events: list[Event]
        if segment.kind == "call":
            events = [DoneEvent(**done, arguments=text, name=segment.name)]
        else:
            if segment.kind == "text":
                done["logprobs"] = self._logprobs
            events = [DoneEvent(**done, text=text)]
            place = self._place("content_part.done", segment, part=True)
            events.append(PartEvent(**place, part=self._content(segment, text, self._logprobs)))
        item = self._item(segment, text, status)
        return [*events, ItemEvent(**self._place("output_item.done", segment), item=item)]

    def _place(self, name: str, segment: Segment, *, part: bool = False) -> dict[str, Any]:
        """The first fields of an event. ``part``: it is of a part of the item."""
        fields = {
            "type": f"response.{name}", "sequence_number": next(self._numbers), "output_index": segment.number
        }  # fmt: skip
        if part:
            fields["item_id"] = self._id(segment)
            if segment.kind != "call":
                fields["content_index"] = 0
        return fields

    def _event(self, response: ResponseObject, kind: str | None = None, **more: Any) -> bytes:
        """The event that has ``response``. ``kind``: default: the response's status."""
        name = f"response.{kind or response.status}"
        numbered = ResponseEvent(type=name, sequence_number=next(self._numbers), response=response, **more)
        return event(numbered.to_json(), name)

    def _response(self, status: Any, **more: Any) -> ResponseObject:
        """``more``: what it has that one in progress has not."""
        generation, body, choice = self.generation, self.body, self.body.tool_choice
        effort = None if body.reasoning is None else body.reasoning.effort
        tools = [
            ToolOfAnswer(**{"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)})
            for tool in body.tools or ()
        ]
        fields: dict[str, Any] = {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": generation.model.name,
            "output": [],
            "usage": None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": ReasoningOptions(effort=effort, summary=None),
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text if body.text and body.text.format else TextOptions(format=TextFormat(type="text")),
            "tool_choice": "auto" if choice is None else choice,
            "tools": tools,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
            "system_fingerprint": generation.model.fingerprint,
            "seed": generation.work.params.seed,
        }
        return ResponseObject(**{**fields, **more})
