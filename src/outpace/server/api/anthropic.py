"""``POST /v1/messages``, and ``/v1/messages/count_tokens``: a chat as Anthropic's clients ask for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from outpace.errors import OutpaceError
from outpace.server import errors
from outpace.server.api import chat
from outpace.server.api.chat import ChatRequest
from outpace.server.api.formats import JsonSchema, ResponseFormat
from outpace.server.api.prompt import Effort
from outpace.server.api.route import STREAMED, Encoder, Route, answered, event, service_of
from outpace.server.api.sampling import Parameters
from outpace.server.conversation.messages import FunctionCall, Message, ToolCall, kind_of, parts_of
from outpace.server.conversation.pieces import Begin, More, Segment, json_object
from outpace.server.conversation.tools import FUNCTION_NAME, MOST_TOOLS, Function, NamedFunction, NamedTool, Tool
from outpace.server.engines.generation import Generation, Part, Speculation, Work, usage
from outpace.server.engines.models import Served
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items

# -- blocks -----------------------------------------------------------------------------------------------------------
# The blocks of ``/v1/messages``: a conversation's, made a chat's messages; and an answer's, whole and as events.


class Block(Body):
    cache_control: Any = Field(default=None, description="Changes nothing: prefixes are cached anyway.")


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Changes nothing.")


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = Field(default=None, description="Changes nothing: the content says it.")


_AnyBlock = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[ToolUseBlock, Tag("Tool_Use")]
    | Annotated[ToolResultBlock, Tag("Tool_Result")],
    Discriminator(
        kind_of,
        custom_error_type="block_type",
        custom_error_message="is of no type that is supported: give text, thinking, tool_use or tool_result",
    ),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[_AnyBlock]


def messages_of(turns: Sequence[Turn], system: str | list[TextBlock] | None) -> list[Message]:
    """A chat's messages. Raises APIError for a block that a turn of its role cannot have."""
    found: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": parts_of(system)}]
    for i, turn in enumerate(turns):
        if isinstance(turn.content, str):
            found.append({"role": turn.role, "content": turn.content})
            continue
        texts, more = [], dict[str, Any]()
        for j, block in enumerate(turn.content):
            if not isinstance(block, TextBlock) and (turn.role == "assistant") == isinstance(block, ToolResultBlock):
                place = f"messages.{i}.content.{j}"
                raise APIError(400, f"{place} is a {block.type}, which a turn of the {turn.role} has not", param=place)
            match block:
                case TextBlock():
                    texts.append(block)
                case ThinkingBlock():
                    more["reasoning_content"] = more.get("reasoning_content", "") + block.thinking
                case ToolUseBlock():
                    function = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                    more.setdefault("tool_calls", []).append(ToolCall(id=block.id, type="function", function=function))
                case ToolResultBlock():  # results come first, as the calls that they answer are right before
                    content = parts_of(block.content or "")
                    found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        if texts or more or not turn.content:
            found.append({"role": turn.role, "content": parts_of(texts), **more})
    return [Message(**message) for message in found]


class TextContent(Answer):
    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


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
    """What a prompt is made of. An answer continues a last turn of the assistant's."""

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
async def messages(request: Request, body: MessagesRequest) -> Answer | Response:
    """Answer a conversation, as Anthropic's clients ask."""

    def work(model: Served, scope: str) -> Work:
        return chat.work(as_chat(body), service_of(request).settings, model, scope)

    return await answered(request, body, MessageEncoder, work, model=body.model, streamed=bool(body.stream))


@router.post("/v1/messages/count_tokens", response_model=Counted)
async def count_tokens(request: Request, body: CountRequest) -> Counted:
    """How many tokens a conversation has."""
    try:
        return Counted(input_tokens=await chat.counted(request, _chat(body), body.model))
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


class MessageEncoder(Encoder):
    """A message: its content's blocks are the segments."""

    prefix, names = "msg_", NAMES
    body: MessagesRequest

    def __init__(self, generation: Generation, body: MessagesRequest) -> None:
        super().__init__(generation, body)
        self._unsent: list[int] = []  # token ids that no event has brought yet
        for part in generation.resumed.values():
            self.fold(part)

    def begin(self) -> bytes:
        if self.generation.resumed:
            return b""
        used = MessageUsage(
            input_tokens=len(self.generation.work.prompts[0]), cache_creation_input_tokens=0, cache_read_input_tokens=0,
            output_tokens=0,
        )  # fmt: skip
        return _sent("message_start", message=self._message([], None, None, used).to_dict())

    @property
    def shows_progress(self) -> bool:
        return bool(self.body.return_progress)

    def progress(self) -> bytes:
        """A ping, which clients pass over."""
        return _sent("ping", prompt_progress=self.generation.progress.to_dict())

    def part(self, part: Part) -> bytes:
        events: list[dict[str, Any]] = []
        for each in part.events:
            segment = each.segment
            event: dict[str, Any] = {"type": "content_block_stop", "index": segment.number}
            if isinstance(each, Begin):
                event |= {"type": "content_block_start", "content_block": _block(segment, "").to_dict()}
            elif isinstance(each, More):
                kind, name = _DELTAS[segment.kind]
                event |= {"type": "content_block_delta", "delta": {"type": kind, name: each.text}}
            events.append(event)
        self._unsent.extend(part.token_ids)
        if events and self.body.return_token_ids:
            events[-1]["token_ids"], self._unsent = self._unsent, []
        self.fold(part)
        return b"".join(_sent(**event) for event in events)

    def end(self) -> bytes:
        answer = self.whole().to_dict()
        delta = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
        return _sent("message_delta", delta=delta, usage=answer["usage"]) + _sent("message_stop")

    def failed(self, error: APIError) -> bytes:
        return event(errors.as_anthropic(error), "error")

    def whole(self) -> MessageAnswer:
        choice, cost = self.only, usage(self.generation)
        cached = cost.prompt_tokens_details.cached_tokens
        sequence = choice.stop_reason if choice.finish == "stop" and isinstance(choice.stop_reason, str) else None
        reasons: dict[Any, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        used = MessageUsage(
            input_tokens=cost.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=cost.completion_tokens,
            speculation=cost.speculation,
        )
        found = {segment: "".join(texts) for segment, texts in choice.joined.texts.items()}
        content = [
            _block(segment, text)
            for segment, text in found.items()
            if segment.kind != "call" or json_object(text) is not None  # it was cut off: the reason says why
        ]
        return self._message(content, "stop_sequence" if sequence else reasons[choice.finish], sequence, used)

    def _message(
        self, content: list[Content], reason: StopReason | None, sequence: str | None, used: MessageUsage
    ) -> MessageAnswer:
        return MessageAnswer(
            id=self.generation.id,
            type="message",
            role="assistant",
            model=self.generation.model.name,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=used,
            system_fingerprint=self.generation.model.fingerprint,
            seed=self.generation.work.params.seed,
        )


_DELTAS = {  # their types, and the fields of their texts
    "text": ("text_delta", "text"), "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip


def _block(segment: Segment, text: str) -> Content:
    match segment.kind:
        case "text":
            return TextContent(type="text", text=text)
        case "thought":
            return ThinkingContent(type="thinking", thinking=text, signature="")
    return ToolUseContent(type="tool_use", id=segment.id, name=segment.name, input=json_object(text) or {})


def _sent(type: str, **fields: Any) -> bytes:
    return event(json.dumps({"type": type, **fields}, ensure_ascii=False).encode(), type)
