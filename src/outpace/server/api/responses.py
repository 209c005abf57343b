"""``POST /v1/responses``: a chat whose messages and answer are items."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request

from outpace.errors import OutpaceError
from outpace.server import errors
from outpace.server.api import chat
from outpace.server.api.answers import chosen_tokens
from outpace.server.api.chat import ChatRequest
from outpace.server.api.formats import JsonSchema, ResponseFormat
from outpace.server.api.items import AnyItem, Event, Output, OutputItem, messages_of
from outpace.server.api.prompt import Effort
from outpace.server.api.route import STREAMED, Route, begun, each_part, service_of, stream
from outpace.server.api.sampling import Parameters
from outpace.server.conversation.messages import Message
from outpace.server.conversation.tools import MOST_TOOLS, Function, NamedFunction, NamedTool, Tool
from outpace.server.engines.generation import Generation, Part, Speculation, Work, usage
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items
from outpace.server.streaming import EventStream, event

router = APIRouter(route_class=Route)

NAMES = {  # of fields of chats', as here
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


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


class ResponsesRequest(Parameters):
    input: str | Items[AnyItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
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


@router.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
async def responses(request: Request, body: ResponsesRequest) -> ResponseObject | EventStream:
    """Answer text, or a conversation of items."""
    service = service_of(request)

    def work(model: Served, scope: str) -> Work:
        return chat.work(as_chat(body), service.settings, model, scope)

    try:
        generation = await begun(request, body.model, "resp_", work)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, NAMES) from error
    making = Making(generation, body)
    if body.stream:
        return _stream(request, making)
    await each_part(request, generation, making.add)
    return await service.work(making.whole)


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


class Making:
    """A response while it is made."""

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        self.generation, self._body = generation, body
        self._output = Output(generation.id.partition("_")[2])
        self._last: Part | None = None
        self._unsaid: list[int] = []  # token ids that no event has brought yet
        for part in generation.resumed.values():
            self.add(part)
        self._unsaid.clear()

    def add(self, part: Part) -> list[Event]:
        """Events of what came."""
        body, model = self._body, self.generation.model
        logprobs = chosen_tokens(part.logprobs, body.top_logprobs or 0, model) if body.logprobs else []
        events = self._output.feed(part.pieces, logprobs)
        if part.result is not None:
            self._last = part
            events += self._output.finish("incomplete" if part.finish == "length" else "completed")
        self._unsaid.extend(part.token_ids)
        if events and body.return_token_ids:
            events[-1].token_ids, self._unsaid = self._unsaid, []
        return events

    def event(self, response: ResponseObject, kind: str | None = None) -> bytes:
        """The event that has ``response``. ``kind``: default: the response's status."""
        name = f"response.{kind or response.status}"
        numbered = ResponseEvent(type=name, sequence_number=next(self._output.numbers), response=response)
        return event(numbered.to_json(), name)

    def response(self, error: APIError | None = None, **more: Any) -> ResponseObject:
        """The response so far, or as ``error`` left it; ``more``: fields that it has at its end."""
        generation, body = self.generation, self._body
        status: Any = "in_progress"
        if error is not None:
            self._output.finish("incomplete")
            status = "failed"
        elif self._last is not None:
            status = "incomplete" if self._last.finish == "length" else "completed"
        choice = body.tool_choice
        fields: dict[str, Any] = {
            "usage": None,
            "tools": [
                ToolOfAnswer(**{"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)})
                for tool in body.tools or ()
            ],
            "text": body.text if body.text and body.text.format else TextOptions(format=TextFormat(type="text")),
        }
        return ResponseObject(
            id=generation.id,
            object="response",
            created_at=generation.created,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=None if error is None else ResponseError(code=error.code or "server_error", message=error.message),
            incomplete_details=Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            model=generation.model.name,
            output=[] if status == "in_progress" else list(self._output.items),
            background=False,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning=ReasoningOptions(effort=None if body.reasoning is None else body.reasoning.effort, summary=None),
            service_tier="default",
            store=False,
            temperature=1.0 if body.temperature is None else body.temperature,
            tool_choice="auto" if choice is None else choice,
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            user=body.user,
            system_fingerprint=generation.model.fingerprint,
            seed=generation.work.params.seed,
            **{**fields, **more},
        )

    def whole(self) -> ResponseObject:
        """The response at its end. Counts tokens, so it is not for the event loop."""
        generation, cost = self.generation, usage(self.generation)
        assert self._last is not None
        assert self._last.result is not None
        tokenizer, thought = generation.model.tokenizer, self._output.reasoning
        thoughts = len(tokenizer.encode(thought, add_special=False)) if thought else 0
        cached = cost.prompt_tokens_details.cached_tokens
        written = 0 if self._body.reuse_prefix is False else cost.prompt_tokens - cached
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = generation.work.prompts[0].tolist()
            more["token_ids"] = list(self._last.result.token_ids)
        return self.response(
            stop_reason=self._last.stop_reason,
            usage=ResponseUsage(
                input_tokens=cost.prompt_tokens,
                input_tokens_details=CachedTokens(cached_tokens=cached, cache_write_tokens=written),
                output_tokens=cost.completion_tokens,
                output_tokens_details=ReasoningTokens(reasoning_tokens=thoughts),
                total_tokens=cost.total_tokens,
                speculation=cost.speculation,
            ),
            **more,
        )


def _stream(request: Request, making: Making) -> EventStream:
    def written(parts: list[Part]) -> bytes:
        return b"".join(event(each.to_json(), each.type) for part in parts for each in making.add(part))

    async def last() -> bytes:
        return await service_of(request).work(lambda: making.event(making.whole()))

    def failed(error: APIError) -> bytes:
        return making.event(making.response(error))

    begun_ = making.response()
    kinds = () if making.generation.resumed else ("created", "in_progress")
    first = b"".join(making.event(begun_, kind) for kind in kinds)
    return stream(request, making.generation, written, last, first=first, failed=failed)
