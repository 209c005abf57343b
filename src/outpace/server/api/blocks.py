"""The blocks of ``/v1/messages``: a conversation's, made a chat's messages; and an answer's, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from outpace.server.api.items import kind_of
from outpace.server.conversation.messages import FunctionCall, Message, TextPart, ToolCall
from outpace.server.conversation.pieces import Piece, Reasoning, Text, ToolStart, json_object
from outpace.server.errors import APIError
from outpace.server.schema import Answer, Body, Items


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


def messages_of(turns: Sequence[Turn], system: str | Sequence[TextBlock] | None) -> list[Message]:
    """A chat's messages. Raises APIError for a block that a turn of its role cannot have."""
    found: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": _text(system)}]
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
                    content = _text(block.content or "")
                    found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        if texts or more or not turn.content:
            found.append({"role": turn.role, "content": _text(texts), **more})
    return [Message(**message) for message in found]


def _text(content: str | Sequence[TextBlock]) -> str | list[TextPart]:
    return content if isinstance(content, str) else [TextPart(type="text", text=block.text) for block in content]


class TextContent(Answer):
    type: Literal["text"]
    text: str
    citations: None


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


class Blocks:
    """An answer's blocks, in the order in which they came. Streamed and unstreamed answers are made here."""

    def __init__(self) -> None:
        self.blocks: list[Content] = []
        self._texts: list[str] = []  # of the open block
        self._open = False

    def feed(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """Events of what came."""
        events: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, ToolStart):
                events += self._begin(ToolUseContent(type="tool_use", id=piece.id, name=piece.name, input={}))
                continue
            match piece:
                case Text(text):
                    block: Content = TextContent(type="text", text="", citations=None)
                    delta = {"type": "text_delta", "text": text}
                case Reasoning(text):
                    block = ThinkingContent(type="thinking", thinking="", signature="")
                    delta = {"type": "thinking_delta", "thinking": text}
                case _:
                    block, text = self.blocks[-1], piece.text
                    delta = {"type": "input_json_delta", "partial_json": text}
            if not self._open or type(self.blocks[-1]) is not type(block):
                events += self._begin(block)
            self._texts.append(text)
            events.append({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})
        return events

    def _begin(self, block: Content) -> list[dict[str, Any]]:
        ended = self.end()
        self.blocks.append(block)
        self._open, self._texts = True, []
        started = {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block.to_dict()}
        return [*ended, started]

    def end(self) -> list[dict[str, Any]]:
        """The open block has its text from now on."""
        if not self._open:
            return []
        text, block = "".join(self._texts), self.blocks[-1]
        match block:
            case ToolUseContent():
                block.input = json_object(text) or {}  # the answer may have ended within it
            case ThinkingContent():
                block.thinking = text
            case _:
                block.text = text
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]
