"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outpace.server.schema.common import Body, Sampling


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    """One of a conversation's. ``reasoning_content``: what the model thought, as this server's answers say it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None  # clients send answers back as they came: these are in them, and empty
    annotations: None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Grammar(Body):
    """What the answer must match: a regular expression, or a grammar of llguidance's Lark."""

    type: Literal["regex", "lark"]
    value: str = Field(min_length=1)


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the model's template.")
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
