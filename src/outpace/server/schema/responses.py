"""``POST /v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from outpace.server.schema.chat import Function, Grammar
from outpace.server.schema.common import Body, Parameters


class Part(Body):
    """Text. Answers' parts may be sent back as they came: their ``logprobs`` change nothing."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, max_length=0)
    logprobs: list[Any] | None = None


class Item(Body):
    """Of a conversation. Answers' items may be sent back as they came: ``id`` and ``status`` change nothing."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    phase: None = None


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | list[Part]


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind.title() if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[CallItem, Tag("Function_Call")]
    | Annotated[CallOutputItem, Tag("Function_Call_Output")]
    | Annotated[ReasoningItem, Tag("Reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="is of no type that is supported: "
        "give a message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _of_ours(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
            raise ValueError(f"{kind!r} is not supported: this server runs no tools of its own; give functions")
        return value


class NamedFunctionTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=128)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class StreamedHow(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Parameters):
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    grammar: Grammar | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the model's template.")
    metadata: dict[str, str] | None = Field(default=None, max_length=16, description="The answer has it, too.")
    stream_options: StreamedHow | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
