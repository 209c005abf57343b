"""A request's ``tools`` and ``tool_choice``: typed, as text for a prompt, and as a grammar that binds the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.errors import Argument, ParameterError
from outpace.server.conversation.formats import Kind
from outpace.server.schema import Body
from outpace.text.schemas import closed

FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"


class Function(Body):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema. Default: no parameters.")
    strict: bool | None = Field(default=None, description="Arguments follow the schema, whatever the choice.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


MOST_TOOLS = 128
Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
_FORMS = {
    "qwen3": (
        "answer with one <tool_call> block for each call:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    ),
    "smollm2": (
        "answer with all calls as a list in one <tool_call> block:\n"
        '<tool_call>[{"name": "...", "arguments": {...}}]</tool_call>'
    ),
    "llama3": (
        'answer with nothing but the call as JSON, and with "; " between several:\n{"name": "...", "parameters": {...}}'
    ),
    "gemma3": (
        "answer with a block that has one call as JSON on each line:\n"
        '```tool_call\n{"name": "...", "arguments": {...}}\n```'
    ),
}


def checked(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates take them. Raises ParameterError for two of one name."""
    found = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    names = [tool["function"]["name"] for tool in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ParameterError(
                Argument(f"tools.{i}.function.name", name), " is given twice: give each function its own name"
            )
    return found


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool["function"]["name"]) for tool in tools)


def choice_name(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The function that ``tool_choice`` names, if it names one. Raises ParameterError where it cannot be honoured."""
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names_of(tools):
            raise ParameterError(
                Argument("tool_choice", name), f" is no function of this request: give one of {sorted(names_of(tools))}"
            )
        return name
    if choice == "required" and not tools:
        raise ParameterError(Argument("tool_choice", choice), " needs ", Argument("tools"), ": give some")
    return None


def tool_grammar(
    kind: Kind,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice = "auto",
    *,
    parallel: bool = True,
    part: bool = False,
    close: bool = False,
) -> str | None:
    """Lark text (llguidance's) for an answer, or None where nothing binds it. ``tools``: as ``checked`` gives them.

    "required" and a named function force calls, in the format of ``kind``; arguments follow their schema (of functions
    that are not ``strict``, as far as the grammar can express it). Under "auto" the answer is bound only where a
    function is strict or ``parallel`` is off: plain text, or text and then calls. A named function is called once.
    ``part``: an answer without a call must be ``@part``, the grammar of the answer's own format. ``close``: arguments
    have no properties that their schema does not name, unless it allows them.
    Raises ParameterError where the choice cannot be honoured.
    """
    name = choice_name(choice, tools)
    if choice == "none" or not tools:
        return None
    if kind == "none":
        raise ParameterError(
            Argument("tool_choice", choice), " cannot be honoured: this model's chat template has no known calls"
        )
    forced = choice != "auto"
    if not forced and not part and parallel and not any(tool["function"].get("strict") for tool in tools):
        return None
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    rules = [*_start(kind, forced, parallel and name is None, part)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(chosen))))
    key = "parameters" if kind == "llama3" else "arguments"
    for i, function in enumerate(chosen):
        opening = json.dumps({"name": function["name"]})[:-1] + f', "{key}": '
        rules.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(function, close))}")
    return "\n".join(rules) + "\n"


def _start(kind: Kind, forced: bool, several: bool, part: bool) -> list[str]:
    """The rules ``start`` and what it needs beside ``call``."""
    head, first, between, tail = {
        "qwen3": ("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        "smollm2": ("<tool_call>", "[", ", ", "]</tool_call>"),
        "gemma3": ("```tool_call", "\n", "\n", "\n```"),
        "llama3": ("", "", "; ", ""),
    }[kind]
    calls = f"{_literal(first)} call" + (f" ({_literal(between)} call)*" if several else "") + f" {_literal(tail)}"
    if forced or part:
        return [f"start: {_literal(head)} {calls}" + (" | @part" if not forced else "")]
    if not head:  # calls are the whole answer, and only they begin with a bracket
        return [
            f'start: {calls} | TEXT | ""',
            r"TEXT: /[^{\[\s](.|\n)*/ & ~/(.|\n)*(<function=|<\|python_tag\|>)(.|\n)*/",
        ]
    return [f"start: TEXT | head {calls}", "TEXT: /(.|\\n)*/", f"head[lazy]: /(.|\\n)*/ {_literal(head)}"]


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _schema(function: Mapping[str, Any], close: bool) -> dict[str, Any]:
    schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
    schema["x-guidance"] = _ONE_LINE | ({} if function.get("strict") else {"lenient": True})
    return dict(closed(schema)) if close else schema


def instructions(kind: Kind, tools: Sequence[Any]) -> str:
    """What a system message says of ``tools``, for templates without a place for them. ``kind`` is not "none"."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, given as JSON:\n<tools>\n{listed}\n</tools>\n"
        f"To call functions, {_FORMS[kind]}\n"
        "What they return comes in the next message. Answer in plain words where no function is needed."
    )


def calls_text(kind: Kind, calls: Sequence[Any]) -> str:
    """Calls as the model itself writes them; ``arguments`` are a mapping, or text that is no JSON object."""
    key = "parameters" if kind == "llama3" else "arguments"
    objects = [
        json.dumps({"name": call["function"]["name"], key: call["function"]["arguments"]}, ensure_ascii=False)
        for call in calls
    ]
    match kind:
        case "llama3":
            return "; ".join(objects)
        case "smollm2":
            return f"<tool_call>[{', '.join(objects)}]</tool_call>"
        case "gemma3":
            return "```tool_call\n" + "\n".join(objects) + "\n```"
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def result_text(text: str) -> str:
    """What a function returned, in a message of the user."""
    return f"<tool_response>\n{text}\n</tool_response>"
