"""A conversation as the model's template writes it, with all that a request says about that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from outpace.server.conversation.messages import Conversation, Messages, conversation
from outpace.server.conversation.tools import ToolChoice, Tools
from outpace.server.engines.models import Served
from outpace.server.errors import APIError, ContextError
from outpace.server.schema import Body
from outpace.text.chat_template import variables_of

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "documents")  # of templates: they have fields
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that say whether the model thinks
_END = "\ue000end\ue001"  # stands at the last message's end while the template is rendered; private characters

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prompt(Body):
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the model's template.")
    reasoning_effort: Effort | None = Field(
        default=None,
        description="Changes nothing where the template knows neither it nor whether to think; all but none think.",
    )
    add_generation_prompt: bool | None = Field(default=None, description="Begin the assistant's turn. Default: true.")
    continue_final_message: bool | None = Field(default=None, description="The answer goes on with the last message.")


def rendered(
    body: Prompt, messages: Messages, tools: Sequence[dict[str, Any]], choice: ToolChoice, model: Served
) -> str:
    """The text of ``messages``, where they spell control tokens with marks (conversation/control.py). ``tools``: as
    ``checked`` gives them. Raises APIError."""
    template = model.tokenizer.chat_template_of(tools=bool(tools) and choice != "none")
    plain = conversation(messages, template, tools, choice)
    if (size := _characters([plain.messages, plain.tools])) > model.most_text:
        raise ContextError("messages", size, model.most_text, unit="characters")
    talk = Conversation(model.control.marked(plain.messages), model.control.marked(plain.tools))
    variables = model.control.marked(_variables(body, template))
    if not body.continue_final_message:
        begin = body.add_generation_prompt is not False
        return model.tokenizer.render_chat(talk.messages, tools=talk.tools, add_generation_prompt=begin, **variables)
    last = talk.messages[-1]
    if body.add_generation_prompt:
        raise APIError(
            400, "continue_final_message and add_generation_prompt exclude each other: give one of them",
            param="continue_final_message",
        )  # fmt: skip
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise APIError(
            400, "continue_final_message needs a last message that is the assistant's text", param="messages"
        )
    marked = [*talk.messages[:-1], {**last, "content": last["content"] + _END}]
    text = model.tokenizer.render_chat(marked, tools=talk.tools, add_generation_prompt=False, **variables)
    begun, end, _ = text.rpartition(_END)
    if not end:
        raise APIError(
            400, "this model's chat template does not write the last message: leave continue_final_message out",
            param="continue_final_message",
        )  # fmt: skip
    return begun


def _characters(value: Any) -> int:
    """Of all texts in ``value``, of JSON's types."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(len, value)) + sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 0


def _variables(body: Prompt, template: str | None) -> Mapping[str, Any]:
    """What the template is given beside messages. Raises APIError for what it does not know."""
    known = frozenset() if template is None else variables_of(template)
    given = dict(body.chat_template_kwargs or {})
    for name in given:
        if name in _OWN_VARIABLES or name not in known:
            raise APIError(
                400, f"chat_template_kwargs.{name} is no variable of this model's chat template: leave it out",
                param=f"chat_template_kwargs.{name}",
            )  # fmt: skip
    effort = body.reasoning_effort
    if effort is None:
        return given
    meant: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in known}
    if "reasoning_effort" in known:
        meant["reasoning_effort"] = effort
    if twice := meant.keys() & given.keys():
        name = min(twice)
        raise APIError(
            400, f"reasoning_effort and chat_template_kwargs.{name} say the same: give one of them",
            param="reasoning_effort",
        )  # fmt: skip
    return {**given, **meant}
