"""Which format of calls and reasoning a model writes, by its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from outpace.server.conversation import reasoning
from outpace.server.conversation.calls import BareCalls, FencedCalls, TaggedCalls
from outpace.server.conversation.channels import ENDS, ChannelParser
from outpace.server.conversation.marked import MarkedCalls
from outpace.server.conversation.pieces import SPACE, CallParser, OutputParser, Piece, Plain, Schemas, ToolId
from outpace.server.conversation.reasoning import ReasoningParser, Unframed
from outpace.server.conversation.spelling import (
    GEMMA3,
    GRANITE3,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA3,
    SMOLLM2,
    Spelling,
    refuses_system,
    written,
)
from outpace.text.chat_template import takes_functions, variables_of
from outpace.text.grammar import After, Thoughts

FENCES = ("```tool_call", "```tool_code", "```json")
HARMONY_THOUGHTS_END = ("<|channel|>", "<|message|>", "<|end|><|start|>assistant")  # with anything between


@dataclass(frozen=True, slots=True)
class Format:
    """What a template says of its model.

    ``calls``: how they are written; None: in no way known here. ``takes_tools``: it puts tools into the prompt itself;
    ``writes_calls``: those, too; otherwise messages.py does. ``as_text``, ``no_content``, ``short_ids``: see
    ``spelling.Written``. ``thoughts``: what stands around thoughts that come before answers; ``may_think``: a variable
    ``enable_thinking`` says whether.
    """

    calls: Spelling | None = None
    takes_tools: bool = False
    writes_calls: bool = False
    as_text: bool = False
    no_content: bool = False
    short_ids: bool = False
    described: bool = False
    no_system: bool = False
    thoughts: tuple[str, str] | None = None
    may_think: bool = False

    @property
    def thinks(self) -> bool:
        return self.thoughts is not None or self.calls is HARMONY

    def marks(self, *, tools: bool) -> str:
        """All that calls, where there are tools, and reasoning may be marked with."""
        if self.calls is HARMONY:
            return "".join((*HARMONY_THOUGHTS_END, HARMONY.marks, *ENDS))
        calls = self.calls.marks if tools and self.calls else ""
        return "\n".join((*(self.thoughts or ()), *(self.calls.frame if self.calls else ()), calls))


@lru_cache(maxsize=64)
def format_of(template: str | None) -> Format:
    """Raises nothing: what cannot be read is of no kind."""
    if template is None:
        return Format()
    names = variables_of(template)
    takes_tools = "tools" in names or takes_functions(names)
    may_think, no_system = "enable_thinking" in names, "messages" in names and refuses_system(template)
    thoughts = reasoning.marks_in(template) or (reasoning.MARKS[0] if may_think else None)
    if "<|channel|>" in template and "<|message|>" in template:
        return Format(HARMONY, takes_tools, takes_tools)
    if found := written(template):
        return Format(
            found.spelling, takes_tools, True, found.as_text, found.no_content, found.short_ids, found.described,
            no_system, thoughts or found.thoughts, may_think,
        )  # fmt: skip
    known = _known(template) or (HERMES if "messages" in names and not takes_tools else None)
    return Format(known, takes_tools, no_system=no_system, thoughts=thoughts, may_think=may_think)


def parser_for(
    template: str | None,
    *,
    tools: bool,
    reasoning: bool,
    tool_id: ToolId,
    prompt: str = "",
    schemas: Schemas = None,
    formatted: bool = False,
) -> OutputParser:
    """A parser for one answer.

    ``tools``: look for calls, of functions in ``schemas`` (of their arguments, by name) alone if those are given;
    ``tool_id``: a call's id from its index. ``formatted``: an answer that is no call has a format that was asked for,
    such as JSON, whose strings may contain what begins a call elsewhere.
    ``reasoning``: look for thoughts; ``prompt``: the rendered prompt, which may have begun them.
    """
    found = format_of(template)
    if found.calls is HARMONY:
        return ChannelParser(tool_id, schemas if tools else {}) if reasoning or tools else Plain()
    answer: OutputParser = Plain()
    if tools and found.calls is not None:
        calls = _parser(found.calls, tool_id, schemas)
        answer = CallsOrText(calls) if formatted and calls.openings else calls
    if found.calls is not None and found.calls.frame:
        answer = Unframed(answer, found.calls.frame)
    if reasoning and found.thoughts is not None:
        return ReasoningParser(answer, found.thoughts, opened=thoughts_opened(template, prompt))
    return answer


def _parser(spelling: Spelling, tool_id: ToolId, schemas: Schemas) -> CallParser:
    if spelling is GEMMA3:
        return FencedCalls(tool_id, schemas, FENCES, "```")
    opening, closing = spelling.begins, spelling.closing + spelling.tail
    if spelling.kind == "objects":
        opening, closing = opening[: opening.rindex("{")].strip(), closing.partition("}")[2].strip()
        marks = opening.removesuffix("[").rstrip(), closing.removeprefix("]").lstrip()
        return TaggedCalls(tool_id, schemas, marks) if marks[0] else BareCalls(tool_id, schemas)
    if spelling.kind == "python":
        return FencedCalls(tool_id, schemas, (opening.rstrip("["),), closing.lstrip(")]"))
    return MarkedCalls(tool_id, schemas, spelling)


def thoughts_opened(template: str | None, prompt: str) -> bool:
    """Whether a rendered prompt ends with the mark that begins thoughts."""
    marks = format_of(template).thoughts
    return marks is not None and prompt.rstrip().endswith(marks[0])


def thoughts_end(template: str | None, prompt: str, *, calls: bool = False) -> After:
    """What ends that which comes before an answer proper, or before ``calls`` or an answer: ``after`` of a grammar.
    Thoughts that the prompt has not begun may be left out."""
    found = format_of(template)
    if found.calls is HARMONY:
        *first, last = HARMONY_THOUGHTS_END
        return (*first, last if calls else last + HARMONY.answer)
    frame = found.calls.frame[:1] if found.calls else ()
    if found.thoughts is None or prompt.rstrip().endswith((found.thoughts[1], *frame)):
        return None
    if frame and not calls:  # the answer proper stands within it
        return (found.thoughts[1], *frame)
    return found.thoughts[1] if thoughts_opened(template, prompt) else Thoughts(*found.thoughts)


def _known(template: str) -> Spelling | None:
    """How models of a family write calls whose template does not."""
    if "<|start_header_id|>" in template or "<|python_tag|>" in template:
        return LLAMA3
    if "<start_of_turn>" in template:
        return GEMMA3
    if "<|tool_call_start|>" in template or "<|tool_list_start|>" in template:
        return LFM2
    if "<parameter=" in template:  # calls that are no JSON, in a way that the template does not show
        return None
    if "<|tool_call|>" in template:
        return GRANITE3
    if "<tool_call>" in template:
        return HERMES
    if "<|im_start|>" in template:  # ChatML without tools of its own: Hermes's way was made for it
        return SMOLLM2 if "SmolLM" in template else HERMES
    return None


class CallsOrText:
    """Reads an answer that is calls from its beginning, or text to its end. Calls begin with a mark."""

    def __init__(self, calls: CallParser) -> None:
        self._calls = calls
        self._held = ""
        self._chosen: OutputParser | None = None

    def feed(self, text: str) -> list[Piece]:
        if self._chosen is None:
            text, self._held = self._held + text, ""
            start = text.lstrip(SPACE)
            if not start:
                self._held = text
                return []
            if not any(opening.startswith(start[: len(opening)]) for opening in self._calls.openings):
                self._chosen = Plain()
            elif start.startswith(self._calls.openings):
                self._chosen = self._calls
            else:
                self._held = text
                return []
        return self._chosen.feed(text)

    def finish(self) -> list[Piece]:
        if self._chosen is None:
            return Plain().feed(self._held)
        return self._chosen.finish()
