"""Which format of calls and thoughts a model writes, from its chat template's source."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from outpace.models.text.chat_template import variables_of
from outpace.server.tools import reasoning as thinking
from outpace.server.tools.base import OutputParser, Plain
from outpace.server.tools.gemma3 import FencedCalls
from outpace.server.tools.llama3 import BareCalls
from outpace.server.tools.qwen3 import TaggedCalls
from outpace.server.tools.reasoning import ReasoningParser

Kind = Literal["llama3", "qwen3", "gemma3", "smollm2", "none"]


@dataclass(frozen=True, slots=True)
class Format:
    """What a template says of its model.

    ``kind``: how calls are written; "none": in no way known here. ``takes_tools``: it puts tools and calls into the
    prompt itself; otherwise messages.py does. ``thinks``: thoughts come before answers; ``may_think``: and a variable
    ``enable_thinking`` says whether.
    """

    kind: Kind
    takes_tools: bool
    thinks: bool
    may_think: bool


@lru_cache(maxsize=64)
def format_of(template: str | None) -> Format:
    """Raises nothing: what cannot be read is of no kind."""
    if template is None:
        return Format("none", False, False, False)
    names = variables_of(template)
    may_think = "enable_thinking" in names
    return Format(_kind(template), "tools" in names, may_think or thinking.CLOSE in template, may_think)


def parser_for(
    template: str | None,
    *,
    tools: bool,
    reasoning: bool,
    tool_id: Callable[[int], str],
    prompt: str = "",
    names: Collection[str] | None = None,
) -> OutputParser:
    """A parser for one answer.

    ``tools``: look for calls, of ``names`` alone if those are given; ``tool_id``: a call's id from its index.
    ``reasoning``: look for thoughts; ``prompt``: the rendered prompt, which may have begun them.
    """
    found = format_of(template)
    answer: OutputParser = Plain()
    if tools:
        match found.kind:
            case "llama3":
                answer = BareCalls(tool_id, names)
            case "qwen3" | "smollm2":
                answer = TaggedCalls(tool_id, names)
            case "gemma3":
                answer = FencedCalls(tool_id, names)
            case "none":
                pass
    if reasoning and found.thinks:
        return ReasoningParser(answer, opened=thoughts_opened(prompt))
    return answer


def thoughts_opened(prompt: str) -> bool:
    """Whether a rendered prompt ends with the mark that begins thoughts."""
    return prompt.rstrip().endswith(thinking.OPEN)


def thoughts_end(template: str | None, prompt: str) -> str | None:
    """The text after which an answer proper begins, where thoughts may come first: ``after`` of a grammar."""
    if not format_of(template).thinks or prompt.rstrip().endswith(thinking.CLOSE):
        return None
    return thinking.CLOSE


def _kind(template: str) -> Kind:
    if "<|start_header_id|>" in template or "<|python_tag|>" in template:
        return "llama3"
    if "<start_of_turn>" in template:
        return "gemma3"
    if "<parameter=" in template:  # Qwen 3 Coder's calls, which are no JSON
        return "none"
    if "<tool_call>" in template:
        return "qwen3"
    if "<|im_start|>" in template:  # ChatML without tools of its own: Hermes's way was made for it
        return "smollm2" if "SmolLM" in template else "qwen3"
    return "none"
