"""A request's ``tools`` and ``tool_choice``: typed, and as text for a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.errors import Argument, ParameterError
from outpace.server.conversation.calls import LONGEST_NAME
from outpace.server.conversation.spelling import Spelling
from outpace.server.schema import Body

FUNCTION_NAME = rf"^[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}$"


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


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the arguments, by the function's name."""
    return {str(tool["function"]["name"]): tool["function"].get("parameters") or {} for tool in tools}


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


def instructions(spelling: Spelling, tools: Sequence[Any]) -> str:
    """What a system message says of ``tools``, for templates without a place for them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = (
        spelling.write([{"function": {"name": "...", "arguments": {}}}]).replace("{}", "{...}").replace("()", "(...)")
    )
    several = " and no more" if spelling.single else f", with {json.dumps(spelling.between)} between several"
    return (
        f"You can call these functions, given as JSON:\n<tools>\n{listed}\n</tools>\n"
        f"To call a function, answer with this{several}:\n{form}\n"
        "What they return comes in the next message. Answer in plain words where no function is needed."
    )


def result_text(text: str) -> str:
    """What a function returned, in a message of the user."""
    return f"<tool_response>\n{text}\n</tool_response>"
