"""A request's ``tools`` and ``tool_choice``: checked, and as a grammar where a call is to be forced or bound."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outpace.errors import Argument, ParameterError
from outpace.server.tools.detect import Kind

Choice = str | Mapping[str, Any]  # "none", "auto", "required", or a mapping that names a function

MOST_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
_FIELDS = frozenset({"name", "description", "parameters", "strict"})


def checked(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Tools in the chat form ``{"type": "function", "function": {...}}``, given in that or in the flat one.

    Raises ParameterError that names what is wrong.
    """
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise ParameterError(Argument(f"{at}.type", kind), ' is not supported: give "function"')
        nested = "function" in tool
        function = tool["function"] if nested else {k: v for k, v in tool.items() if k != "type"}
        at = f"{at}.function" if nested else at
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ParameterError(
                Argument(f"{at}.name", name), " is no name of a function: give up to 64 letters, digits, _, - or ."
            )
        if unknown := sorted(set(function) - _FIELDS):
            raise ParameterError(Argument(f"{at}.{unknown[0]}"), " is not supported: leave it out")
        if any(name == other["function"]["name"] for other in found):
            raise ParameterError(Argument(f"{at}.name", name), " is given twice: give each function its own name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ParameterError(Argument(f"{at}.parameters", parameters), " is no JSON schema: give an object")
        found.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    if len(found) > MOST_TOOLS:
        raise ParameterError(Argument("tools"), f" has {len(found)}: give at most {MOST_TOOLS}")
    return found


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool["function"]["name"]) for tool in tools)


def choice_name(choice: Choice, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The function that ``tool_choice`` names, if it names one. Raises ParameterError for what is no choice."""
    if choice in ("none", "auto"):
        return None
    if choice == "required":
        if not tools:
            raise ParameterError(Argument("tool_choice", choice), " needs ", Argument("tools"), ": give some")
        return None
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise ParameterError(
            Argument("tool_choice", choice),
            ' is unknown: give "none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
        )
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
    if name not in names_of(tools):
        raise ParameterError(
            Argument("tool_choice", choice),
            f" names no function of this request: give one of {sorted(names_of(tools))}",
        )
    return str(name)


def tool_grammar(
    kind: Kind, tools: Sequence[Mapping[str, Any]], choice: Choice = "auto", *, parallel: bool = True
) -> str | None:
    """Lark text (llguidance's) for an answer, or None where nothing binds it. ``tools``: as ``checked`` gives them.

    "required" and a named function force calls, in the format of ``kind``; arguments follow their schema (of functions
    that are not ``strict``, as far as the grammar can express it). Under "auto" the answer is bound only where a
    function is strict or ``parallel`` is off: plain text, or text and then calls. A named function is called once.
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
    if not forced and parallel and not any(tool["function"].get("strict") for tool in tools):
        return None
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    rules = [*_start(kind, forced, parallel and name is None)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(chosen))))
    key = "parameters" if kind == "llama3" else "arguments"
    for i, function in enumerate(chosen):
        opening = json.dumps({"name": function["name"]})[:-1] + f', "{key}": '
        rules.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(function))}")
    return "\n".join(rules) + "\n"


def _start(kind: Kind, forced: bool, several: bool) -> list[str]:
    """The rules ``start`` and what it needs beside ``call``."""
    head, first, between, tail = {
        "qwen3": ("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        "smollm2": ("<tool_call>", "[", ", ", "]</tool_call>"),
        "gemma3": ("```tool_call", "\n", "\n", "\n```"),
        "llama3": ("", "", "; ", ""),
    }[kind]
    calls = f"{_literal(first)} call" + (f" ({_literal(between)} call)*" if several else "") + f" {_literal(tail)}"
    if forced:
        return [f"start: {_literal(head)} {calls}"]
    if not head:  # calls are the whole answer, and only they begin with a bracket
        return [
            f'start: {calls} | TEXT | ""',
            r"TEXT: /[^{\[\s](.|\n)*/ & ~/(.|\n)*(<function=|<\|python_tag\|>)(.|\n)*/",
        ]
    return [f"start: TEXT | head {calls}", "TEXT: /(.|\\n)*/", f"head[lazy]: /(.|\\n)*/ {_literal(head)}"]


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
    schema["x-guidance"] = _ONE_LINE | ({} if function.get("strict") else {"lenient": True})
    return schema
