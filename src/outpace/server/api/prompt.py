"""A conversation as the model's template writes it, with all that a request says about that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from outpace.server.conversation.messages import Conversation, Messages, conversation
from outpace.server.conversation.tools import ToolChoice, Tools
from outpace.server.engines.models import Served
from outpace.server.errors import APIError, ContextError, cut
from outpace.server.schema import Body
from outpace.text.chat_template import variables_of

_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "documents")  # of templates: they have fields
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that say whether the model thinks
_END = "\ue000end\ue001"  # stands at the last message's end while the template is rendered; private characters

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prompt(Body):
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the model's template; others change nothing."
    )
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


def dropped(body: Prompt, template: str | None) -> list[str]:
    """What is asked of the template, which knows nothing of it."""
    known = frozenset() if template is None else variables_of(template)
    names = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or () if name not in known]
    if body.reasoning_effort not in (None, "none") and not known & {*_SWITCHES, "reasoning_effort"}:
        names.append("reasoning_effort")
    return [f"{cut(name, 100)} changes nothing: this model's chat template does not know it" for name in names[:_NOTES]]


_NOTES = 8


def _variables(body: Prompt, template: str | None) -> Mapping[str, Any]:
    """What the template is given beside messages. Raises APIError for what is not a request's to say."""
    known = frozenset() if template is None else variables_of(template)
    for name in body.chat_template_kwargs or ():
        if name in _OWN_VARIABLES:
            raise APIError(
                400, f"chat_template_kwargs.{name} is no variable that a request sets: leave it out",
                param=f"chat_template_kwargs.{name}",
            )  # fmt: skip
    given = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name in known}
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
