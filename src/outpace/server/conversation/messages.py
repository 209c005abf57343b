"""Conversations in OpenAI's form, typed, and made what chat templates take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.errors import Argument, ParameterError
from outpace.server.conversation.formats import Format, format_of
from outpace.server.conversation.pieces import json_object
from outpace.server.conversation.tools import ToolChoice, choice_name, instructions, result_text
from outpace.server.schema import Body, Items, only


class TextPart(Body):
    type: Annotated[Literal["text"], only("text")]
    text: str
    cache_control: Any = Field(default=None, description="Changes nothing: prefixes are cached anyway.")


def parts_of(content: str | list[Any]) -> str | list[TextPart]:
    """A message's content, of another protocol's parts that have a ``text``."""
    if isinstance(content, str):
        return content
    return [TextPart(type="text", text=part.text) for part in content]


class FunctionCall(Body):
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON text.")
    parsed_arguments: Any = Field(default=None, description="Changes nothing: openai's helpers add it.")


class ToolCall(Body):
    id: str = Field(min_length=1)
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(default=None, description="Changes nothing: deltas have it.")


class Message(Body):
    """Of a conversation. Answers may be sent back as they came: ``refusal`` and what follows it change nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(default=None, description="The model's reasoning, as answers have it.")
    reasoning: str | None = Field(default=None, description="The same, as others call it.")
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    provider_specific_fields: Any = None

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


def kind_of(item: Any) -> str | None:
    """The tag of an item's branch in a union: its type, with capitals, which no field's name has."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind.title() if isinstance(kind, str) else None


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Arguments of ``ChatTemplate.render``. ``tools``: None where the template is not to know of any."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def conversation(
    messages: Sequence[Message],
    template: str | None,
    tools: Sequence[dict[str, Any]] = (),
    choice: ToolChoice = "auto",
) -> Conversation:
    """A request's messages and its tools (``tools.checked``) as this template takes them.

    Content parts become one text, with a line break between them; ``developer`` becomes ``system``; a call's arguments
    become a mapping, where they are a JSON object. With ``choice`` "none" the prompt mentions no tools. A function
    without parameters or description has empty ones, which templates read.
    Raises ParameterError that names what is refused.
    """
    found = format_of(template)
    offered = list(tools) if choice != "none" else []
    if offered and found.calls is None:
        raise ParameterError(
            Argument("tools"),
            " cannot be offered: this model's chat template writes calls in no way that is known; leave them out",
        )
    choice_name(choice, offered)
    plain = _plain(messages)
    if found.writes_calls:
        plain = _as_written(plain, found)
    else:
        plain = _in_text(plain, found)
    if offered and not found.takes_tools:
        plain = _listed(plain, found, offered)
    if found.no_system:
        plain = _without_system(plain)
    return Conversation(plain, [_complete(tool, found) for tool in offered if found.takes_tools] or None)


def _complete(tool: dict[str, Any], form: Format) -> dict[str, Any]:
    """With all that a function may say: Hermes's template raises for what is not there."""
    function = {**tool["function"]}
    function.setdefault("description", "")
    function["parameters"] = {**function.get("parameters", {})}
    function["parameters"].setdefault("type", "object")
    found = function["parameters"].setdefault("properties", {})
    if form.described and isinstance(found, dict):
        function["parameters"]["properties"] = {
            name: {"description": "", **schema} if isinstance(schema, dict) else schema
            for name, schema in found.items()
        }
    return {**tool, "function": function}


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the system's text before the first question's: Gemma 2's template has no other place for it."""
    if messages[0]["role"] != "system":
        return messages
    text, rest = messages[0]["content"], messages[1:]
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": text}, *rest]
    return [{**rest[0], "content": "\n\n".join(part for part in (text, rest[0]["content"]) if part)}, *rest[1:]]


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them. What a role may say is checked here."""
    found: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # of the last assistant message, by id: the function's name
    for i, message in enumerate(messages):
        role, calls = message.role, message.tool_calls or ()
        for name, value, owner in (
            ("tool_calls", calls or None, "assistant"),
            ("reasoning_content", message.thoughts, "assistant"),
            ("tool_call_id", message.tool_call_id, "tool"),
        ):
            if value is not None and role != owner:
                raise ParameterError(
                    Argument(f"messages.{i}.{name}"), f" belongs to messages of the {owner}: leave it out of a {role}'s"
                )
        if message.content is None and not calls:
            raise ParameterError(Argument(f"messages.{i}.content"), " is missing: give text, or a list of text parts")
        content = message.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
        if role == "tool":
            if message.tool_call_id not in open_calls:
                raise ParameterError(
                    Argument(f"messages.{i}.tool_call_id", message.tool_call_id),
                    " answers no call of the assistant's message before it: give the id of one",
                )
            plain |= {"tool_call_id": message.tool_call_id, "name": open_calls[message.tool_call_id]}
        else:
            open_calls = {call.id: call.function.name for call in calls}
            if message.name is not None:
                plain["name"] = message.name
        if calls:
            plain["tool_calls"] = [_call(call) for call in calls]
        if message.thoughts is not None:
            plain["reasoning_content"] = message.thoughts
        found.append(plain)
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    text = call.function.arguments  # what the model once wrote wrongly stays the text that it was
    found = json_object(text or "{}")  # templates iterate over arguments
    function = {"name": call.function.name, "arguments": text if found is None else found}
    return {"id": call.id, "type": "function", "function": function}


def _as_written(messages: list[dict[str, Any]], form: Format) -> list[dict[str, Any]]:
    """Messages with calls as this template takes them."""
    for message in messages:
        calls = message.get("tool_calls", ())
        if calls and form.calls is None:
            raise _unwritten()
        if calls and form.no_content and not message["content"]:
            message["content"] = None
        for call in calls:
            arguments = call["function"]["arguments"]
            if form.as_text and not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
            if form.short_ids:
                call["id"] = _short(call["id"])
        if form.short_ids and "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])
    return _one_call_each(messages) if form.calls is not None and form.calls.single else messages


def _short(id_: str) -> str:
    """As Mistral's templates want them: nine letters or digits."""
    return hashlib.sha256(id_.encode()).hexdigest()[:9]


def _unwritten() -> ParameterError:
    return ParameterError(
        Argument("messages"), " hold tool calls, which this model's chat template cannot write: drop them"
    )


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some templates (Llama 3, gpt-oss) take one call a message: each gets its own, its result right after it."""
    found: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        if not calls and message["role"] != "tool":
            found.append(message)
        results = list(takewhile(lambda m: m["role"] == "tool", messages[i + 1 :]))
        for j, call in enumerate(calls):
            found.append({**message, "content": "" if j else message["content"], "tool_calls": [call]})
            found += [result for result in results if result["tool_call_id"] == call["id"]]
    return found


def _in_text(messages: list[dict[str, Any]], form: Format) -> list[dict[str, Any]]:
    """Calls in the assistant's text; results in messages of the user, where the template knows no tools."""
    found: list[dict[str, Any]] = []
    results = False  # whether the last message holds results
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls := message.get("tool_calls"):
            if form.calls is None:
                raise _unwritten()
            plain["content"] = "\n".join(part for part in (message["content"], form.calls.write(calls)) if part)
        is_result = message["role"] == "tool" and not form.takes_tools
        if is_result:
            plain = {"role": "user", "content": result_text(message["content"])}
        if plain["role"] == "user" and results:  # templates want turns to alternate
            found[-1]["content"] += "\n" + plain["content"]
        else:
            found.append(plain)
        results = is_result or (plain["role"] == "user" and results)
    return found


def _listed(messages: list[dict[str, Any]], form: Format, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """``messages`` with the tools in the system message."""
    assert form.calls is not None
    listed = instructions(form.calls, tools)
    first = messages[0]
    if first["role"] == "system":
        text = "\n\n".join(part for part in (first["content"], listed) if part)
        return [{**first, "content": text}, *messages[1:]]
    return [{"role": "system", "content": listed}, *messages]
