"""``POST /v1/messages``, and ``/v1/messages/count_tokens``: a chat as Anthropic's clients ask for it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

from outpace.errors import OutpaceError
from outpace.server import errors
from outpace.server.api import chat
from outpace.server.api.blocks import Block, Blocks, Content, TextBlock, Turn, messages_of
from outpace.server.api.chat import ChatRequest
from outpace.server.api.formats import JsonSchema, ResponseFormat
from outpace.server.api.models import leased
from outpace.server.api.prompt import Effort, rendered
from outpace.server.api.route import STREAMED, Route, begun, each_part, service_of, stream
from outpace.server.api.sampling import Parameters
from outpace.server.conversation.tools import FUNCTION_NAME, MOST_TOOLS, Function, NamedFunction, NamedTool, Tool
from outpace.server.conversation.tools import checked as checked_tools
from outpace.server.engines.generation import Generation, Part, Speculation, Work, usage
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items
from outpace.server.streaming import EventStream, event

router = APIRouter(
    route_class=Route, responses={status: {"model": errors.AnthropicRefusal} for status in ("4XX", "5XX")}
)

NAMES = {"max_completion_tokens": "max_tokens", "response_format": "output_config.format", "stop": "stop_sequences"}
NAMES |= {"reasoning_effort": "thinking", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}  # of chats'


class CustomTool(Block):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(default=None, description="Changes nothing: arguments always stream.")


_Stop = Annotated[str, Field(max_length=1024)]  # as of chats


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """``adaptive``: as the model's template has it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, description="Changes nothing: max_tokens bounds thoughts, too.")
    display: Literal["summarized"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = Field(default=None, max_length=512, description="Named in the server's log.")


class Conversation(Body):
    """What a prompt is made of. A last turn of the assistant's is gone on with."""

    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | Items[TextBlock] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = Field(default=None, description="Changes nothing.")


class CountRequest(Conversation):
    model: str | None = None


class MessagesRequest(Parameters, Conversation):
    max_tokens: int
    stop_sequences: Annotated[list[_Stop], Field(max_length=64, fail_fast=True)] | None = None
    metadata: Metadata | None = None
    inference_geo: str | None = Field(default=None, description="Changes nothing.")
    speed: Literal["standard", "fast"] | None = Field(default=None, description="Changes nothing.")


class MessageUsage(Answer):
    """``input_tokens``: without those that were read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    speculation: Speculation | None = None


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    system_fingerprint: str
    seed: int | None


class Counted(Answer):
    input_tokens: int


@router.post("/v1/messages", response_model=MessageAnswer, responses=STREAMED)
async def messages(request: Request, body: MessagesRequest) -> MessageAnswer | EventStream:
    """Answer a conversation, as Anthropic's clients ask."""
    service = service_of(request)

    def work(model: Served, scope: str) -> Work:
        return chat.work(as_chat(body), service.settings, model, scope)

    try:
        generation = await begun(request, body.model, "msg_", work)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, NAMES) from error
    making = Making(generation, body)
    if body.stream:
        return _stream(request, making)
    await each_part(request, generation, making.add)
    return await service.work(making.whole)


@router.post("/v1/messages/count_tokens", response_model=Counted)
async def count_tokens(request: Request, body: CountRequest) -> Counted:
    """How many tokens a conversation has."""

    def counted(model: Served) -> Counted:
        asked = _chat(body)
        text = rendered(asked, asked.messages, checked_tools(asked.tools), asked.tool_choice or "auto", model)
        return Counted(input_tokens=len(model.control.encode(text)))

    try:
        return await leased(request, body.model, counted)
    except (APIError, OutpaceError) as error:
        raise errors.of(error, NAMES) from error


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The chat that ``body`` asks for. Raises APIError for what means nothing."""
    if body.traced:
        raise APIError(
            400, "speculation.trace is not supported here: ask /v1/chat/completions", param="speculation.trace"
        )
    if body.stop is not None and body.stop_sequences is not None:
        raise APIError(400, "stop and stop_sequences say the same: give one of them", param="stop")
    shared = {name: getattr(body, name) for name in Parameters.model_fields if name not in ("metadata", "stop")}
    return _chat(
        body,
        **shared | {"user": body.user or (body.metadata and body.metadata.user_id)},
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences or body.stop,
    )


def _chat(body: Conversation, **more: Any) -> ChatRequest:
    choice, output, thinking = body.tool_choice, body.output_config or OutputConfig(), body.thinking
    last = body.messages[-1]
    effort = output.effort
    if thinking is not None and thinking.type != "adaptive":
        effort = "none" if thinking.type == "disabled" else effort or "medium"
    schema = None if output.format is None else JsonSchema(name="output", schema=output.format.schema_)
    talk = messages_of(body.messages, body.system)
    return chat.asked(
        **more,
        messages=talk,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        reasoning_effort=effort,
        response_format=None if schema is None else ResponseFormat(type="json_schema", json_schema=schema),
        continue_final_message=(last.role == "assistant" and not talk[-1].tool_calls) or None,
    )


def _tool(tool: CustomTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )  # fmt: skip
    return Tool(type="function", function=function)


def _choice(choice: Choice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise APIError(400, "tool_choice.name is missing: give it", param="tool_choice.name")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return {"any": "required"}.get(choice.type, choice.type)


class Making:
    """A message while it is made."""

    def __init__(self, generation: Generation, body: MessagesRequest) -> None:
        self.generation, self._body = generation, body
        self._content = Blocks()
        self._last: Part | None = None
        self._unsaid: list[int] = []  # token ids that no event has brought yet
        for part in generation.resumed.values():
            self.add(part)
        self._unsaid.clear()

    def add(self, part: Part) -> list[dict[str, Any]]:
        """Events of what came."""
        events = self._content.feed(part.pieces)
        if part.result is not None:
            self._last = part
            events += self._content.end()
        self._unsaid.extend(part.token_ids)
        if events and self._body.return_token_ids:
            events[-1]["token_ids"], self._unsaid = self._unsaid, []
        return events

    def begun(self) -> MessageAnswer:
        """The message before anything came."""
        tokens = len(self.generation.work.prompts[0])
        nothing = MessageUsage(
            input_tokens=tokens, cache_creation_input_tokens=0, cache_read_input_tokens=0, output_tokens=0
        )
        return self._message(None, None, nothing)

    def whole(self) -> MessageAnswer:
        """The message at its end."""
        assert self._last is not None
        cost, stopped = usage(self.generation), self._last.stop_reason
        cached = cost.prompt_tokens_details.cached_tokens
        sequence = stopped if self._last.finish == "stop" and isinstance(stopped, str) else None
        reasons: dict[Any, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        used = MessageUsage(
            input_tokens=cost.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=cost.completion_tokens,
            speculation=cost.speculation,
        )
        return self._message("stop_sequence" if sequence else reasons[self._last.finish], sequence, used)

    def _message(self, reason: StopReason | None, sequence: str | None, used: MessageUsage) -> MessageAnswer:
        return MessageAnswer(
            id=self.generation.id,
            type="message",
            role="assistant",
            model=self.generation.model.name,
            content=list(self._content.blocks),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=used,
            system_fingerprint=self.generation.model.fingerprint,
            seed=self.generation.work.params.seed,
        )


def _stream(request: Request, making: Making) -> EventStream:
    def sent(data: dict[str, Any]) -> bytes:
        return event(json.dumps(data, ensure_ascii=False).encode(), data["type"])

    def written(parts: list[Part]) -> bytes:
        return b"".join(sent(each) for part in parts for each in making.add(part))

    async def last() -> bytes:
        answer = (await service_of(request).work(making.whole)).to_dict()
        delta = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        ended = {"type": "message_delta", "delta": delta, "usage": answer["usage"]}
        return sent(ended) + sent({"type": "message_stop"})

    def failed(error: APIError) -> bytes:
        return event(errors.as_anthropic(error), "error")

    resumed = bool(making.generation.resumed)
    first = b"" if resumed else sent({"type": "message_start", "message": making.begun().to_dict()})
    return stream(request, making.generation, written, last, first=first, failed=failed)
