"""Tools, calls and their results as text, for templates that have no place for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outpace.server.tools.detect import Kind

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


def instructions(kind: Kind, tools: Sequence[Any]) -> str:
    """What a system message says of ``tools``. ``kind`` is not "none"."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, given as JSON:\n<tools>\n{listed}\n</tools>\n"
        f"To call functions, {_FORMS[kind]}\n"
        "What they return comes in the next message. Answer in plain words where no function is needed."
    )


def written(kind: Kind, calls: Sequence[Any]) -> str:
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


def result(text: str) -> str:
    """What a function returned, in a message of the user."""
    return f"<tool_response>\n{text}\n</tool_response>"
