"""Conversations in OpenAI's form, made what chat templates take; what they cannot take is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from outpace.errors import Argument, ParameterError
from outpace.server.tools import prompts
from outpace.server.tools.definitions import Choice, choice_name
from outpace.server.tools.detect import Format, format_of

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Arguments of ``ChatTemplate.render``. ``tools``: None where the template is not to know of any."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def conversation(
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    choice: Choice = "auto",
) -> Conversation:
    """A request's messages and its checked tools (``definitions.checked``) as this template takes them.

    Content parts become one text, with a line break between them; ``developer`` becomes ``system``; a call's arguments
    become a mapping, where they are a JSON object. With ``choice`` "none" the prompt tells of no tools. A function
    without parameters or description has empty ones, which templates read.
    Raises ParameterError that names what is refused.
    """
    found = format_of(template)
    offered = [dict(tool) for tool in tools or ()] if choice != "none" else []
    if offered and found.kind == "none":
        raise ParameterError(
            Argument("tools"),
            " cannot be offered: this model's chat template writes calls in no way that is known; leave them out",
        )
    choice_name(choice, offered)
    plain = _plain(messages)
    if found.kind == "llama3" and found.takes_tools:
        plain = _one_call_each(plain)
    if found.takes_tools:
        return Conversation(plain, [_complete(tool) for tool in offered] or None)
    if offered or any("tool_calls" in m or m["role"] == "tool" for m in plain):
        plain = _told(plain, found, offered)
    return Conversation(plain)


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With all that a function may say: Hermes's template raises for what is not there."""
    function = {**tool["function"]}
    function.setdefault("description", "")
    function["parameters"] = {**function.get("parameters", {})}
    function["parameters"].setdefault("type", "object")
    function["parameters"].setdefault("properties", {})
    return {**tool, "function": function}


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise ParameterError(Argument("messages"), " is empty: give at least one message")
    found: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}  # of the last assistant message, by id: the function's name
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            raise ParameterError(Argument(f"{at}.role", role), f" is unknown: give one of {', '.join(ROLES)}")
        plain: dict[str, Any] = {"role": "system" if role == "developer" else role}
        calls = message.get("tool_calls")
        if calls and role != "assistant":
            raise ParameterError(Argument(f"{at}.tool_calls"), f" are the assistant's: leave them out of a {role}'s")
        plain["content"] = _content(message.get("content"), at, optional=bool(calls))
        for name, whose in (("tool_call_id", "tool"), ("reasoning_content", "assistant")):
            if role != whose and message.get(name) is not None:
                raise ParameterError(
                    Argument(f"{at}.{name}"), f" belongs in messages of the {whose}: leave it out of a {role}'s"
                )
        if role == "tool":
            its_id = message.get("tool_call_id")
            if not isinstance(its_id, str) or its_id not in open_calls:
                raise ParameterError(
                    Argument(f"{at}.tool_call_id", its_id),
                    " answers no call of the assistant's message before it: give the id of one",
                )
            plain |= {"tool_call_id": its_id, "name": open_calls[its_id]}
        else:
            open_calls = {}
            if isinstance(message.get("name"), str):
                plain["name"] = message["name"]
        if calls:
            plain["tool_calls"] = [_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]
            open_calls = {call["id"]: call["function"]["name"] for call in plain["tool_calls"]}
        if role == "assistant" and isinstance(message.get("reasoning_content"), str):
            plain["reasoning_content"] = message["reasoning_content"]
        found.append(plain)
    return found


def _content(content: Any, at: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ParameterError(Argument(f"{at}.content", content), " is no text: give text, or a list of text parts")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal", "input_text", "output_text"):
            raise ParameterError(
                Argument(f"{at}.content[{j}].type", kind), " is not supported: this model reads text alone"
            )
        if not isinstance(text, str):
            raise ParameterError(Argument(f"{at}.content[{j}].text", text), " is no text: give some")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, at: str) -> dict[str, Any]:
    kind = call.get("type", "function") if isinstance(call, Mapping) else None
    if kind != "function":
        raise ParameterError(Argument(f"{at}.type", kind), ' is not supported: give "function"')
    function, its_id = call.get("function"), call.get("id")
    if not isinstance(its_id, str) or not its_id:
        raise ParameterError(Argument(f"{at}.id", its_id), " is missing: give the id the call came with")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ParameterError(Argument(f"{at}.function.name", name), " is missing: give the function's name")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise ParameterError(Argument(f"{at}.function.arguments", arguments), " is no text: give JSON text")
    return {"id": its_id, "type": "function", "function": {"name": name, "arguments": _mapping(arguments)}}


def _mapping(arguments: str) -> dict[str, Any] | str:
    """Templates iterate over arguments. What the model once wrote wrongly stays the text that it was."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Llama 3's template takes one call a message: each gets its own, its result right after it."""
    found: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        if not calls and message["role"] != "tool":
            found.append(message)
        results = list(takewhile(lambda m: m["role"] == "tool", messages[i + 1 :]))
        for j, call in enumerate(calls):
            found.append({**message, "content": "" if j else message["content"], "tool_calls": [call]})
            found += [its for its in results if its["tool_call_id"] == call["id"]]
    return found


def _told(messages: list[dict[str, Any]], form: Format, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools in the system message, calls in the assistant's text, results in messages of the user."""
    found: list[dict[str, Any]] = []
    results = False  # whether the last message holds results
    for message in messages:
        text, role = message["content"], message["role"]
        if calls := message.get("tool_calls"):
            if form.kind == "none":
                raise ParameterError(
                    Argument("messages"), " hold tool calls, which this model's chat template cannot tell: drop them"
                )
            text = "\n".join(part for part in (text, prompts.written(form.kind, calls)) if part)
        if role == "tool":
            role, text = "user", prompts.result(text)
        if role == "user" and results:  # templates want turns to alternate
            found[-1]["content"] += "\n" + text
        else:
            found.append({"role": role, "content": text})
        results = message["role"] == "tool" or (role == "user" and results)
    if tools:
        told = prompts.instructions(form.kind, tools)
        if found[0]["role"] == "system":
            found[0]["content"] = "\n\n".join(part for part in (found[0]["content"], told) if part)
        else:
            found.insert(0, {"role": "system", "content": told})
    return found
