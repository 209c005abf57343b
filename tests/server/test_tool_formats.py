"""Formats of calls that are read off templates: in the shapes of published ones (published.py), random calls that a
template renders come back, and what a grammar forces is what a template renders."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.models.load import resolve
from outpace.models.weights.gguf import GGUFFile
from outpace.server.conversation.binding import tool_grammar
from outpace.server.conversation.formats import Format, format_of, parser_for, thoughts_end
from outpace.server.conversation.messages import Message, conversation
from outpace.server.conversation.pieces import Call
from outpace.server.conversation.spelling import HARMONY
from outpace.server.conversation.tools import Tool, checked
from outpace.text.chat_template import ChatTemplate
from outpace.text.grammar import Grammar, Grammars
from outpace.text.tokenizer import Tokenizer
from tests.server.formats import Read, read
from tests.server.published import (
    COMMAND_R_PLUS,
    FIREFUNCTION,
    GEMMA2,
    GIGACHAT3,
    GPT_OSS,
    LFM2,
    LLAMA_CPP_R1,
    PHI35,
    PUBLISHED,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string"}, "count": {"type": "integer"}, "exact": {"type": "boolean"},
        "lines": {"type": "array", "items": {"type": "string"}}, "more": {"$ref": "#/$defs/more"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["command"],
    "additionalProperties": False,
    "$defs": {"more": {"type": "object"}},
}  # fmt: skip
NAMES = ("bash", "read_file")
TOOLS = checked([
    Tool.model_validate({"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}})
    for name in NAMES
])  # fmt: skip
SCHEMAS = dict.fromkeys(NAMES, SCHEMA)
LETTERS = st.text(st.sampled_from("ab é日😀 <>/[]{}|\"'\\&=:\n\t,0"), max_size=12)
TEXTS = st.one_of(LETTERS, st.sampled_from(["12", "true", "null", "[1]", "</parameter", "</arg_value", "\n", "{}"]))
MORE = st.dictionaries(st.sampled_from(["a", "b"]), st.one_of(st.none(), st.booleans(), st.integers(), TEXTS))
ARGUMENTS = st.fixed_dictionaries(
    {"command": TEXTS},
    optional={
        "count": st.integers(-9999, 9999), "exact": st.booleans(), "lines": st.lists(TEXTS, max_size=3), "more": MORE,
    },
)  # fmt: skip
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
QUESTION = {"role": "user", "content": "Well?"}


def form(template: str) -> Format:
    return format_of(template)


def reader(template: str, *, prompt: str = "") -> Any:
    return parser_for(template, tools=True, reasoning=True, tool_id="c{}".format, prompt=prompt, schemas=SCHEMAS)


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})


def answer(template: str, calls: list[tuple[str, dict[str, Any]]], **more: Any) -> str:
    """What the assistant says, as the template has it in a conversation that goes on."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(its)}}
        for i, (name, its) in enumerate(calls)
    ]
    sent: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": None, "tool_calls": made, **more}]
    talk = conversation([Message.model_validate(each) for each in sent], template, TOOLS)
    before = conversation([Message.model_validate(QUESTION)], template, TOOLS)
    prompt = compiled(template).render(before.messages, tools=before.tools)
    text = compiled(template).render(talk.messages, tools=talk.tools, add_generation_prompt=False)
    assert text.startswith(prompt)
    ends = [at for end in ("<|im_end|>", "[e~[", "<turn|>", "</s>", "<｜end▁of▁sentence｜>", "<|end_of_text|>",
                           "<|eom_id|>", "<|close|>message<|sep|>", "<|message_sep|>",
                           "<|END_OF_TURN_TOKEN|>", "<|end|>") if (at := text.rfind(end)) > len(prompt)]  # fmt: skip
    return text[len(prompt) : max(ends)]


def values(found: Read) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


@pytest.mark.parametrize("name", PUBLISHED)
def test_calls_that_a_template_renders_come_back(name: str) -> None:
    template = PUBLISHED[name]
    tags = form(template).calls is not None and form(template).calls.tags  # type: ignore[union-attr]

    @settings(max_examples=25, deadline=None, database=None)
    @given(CALLS, st.integers(1, 9))
    def check(calls: list[tuple[str, dict[str, Any]]], step: int) -> None:
        text = answer(template, calls)
        if tags and any(tags.closing in value for _, its in calls for value in its.values() if isinstance(value, str)):
            return  # which nobody could tell from the end
        if '<|"|>' in text and any('<|"|>' in str(its) for _, its in calls):
            return
        if name == "minimax-m3" and any(
            value is None or isinstance(value, str) for _, its in calls for value in its.get("more", {}).values()
        ):
            return  # whose tags say nothing of types, and none of null
        whole = read(reader(template), [text])
        assert values(whole) == calls
        assert not whole.text.strip()
        assert read(reader(template), [text[i : i + step] for i in range(0, len(text), step)]) == whole

    check()


BASH = ("bash", {"command": "ls -l\necho é", "count": 3, "exact": True, "lines": ["x"]})


@pytest.mark.parametrize("name", PUBLISHED)
def test_cut_at_every_character_and_while_it_grows(name: str) -> None:
    """Two calls between words, after reasoning. A text leaves as it is written; nothing of it waits for its end."""
    template = PUBLISHED[name]
    thoughts = {"reasoning_content": "Hm.\nSo."} if form(template).thinks else {}
    text = answer(template, [BASH, ("read_file", {"command": "f"})], **thoughts)
    expected = read(reader(template), [text])
    assert values(expected) == [BASH, ("read_file", {"command": "f"})]
    assert (expected.thoughts, expected.text.strip()) == (thoughts.get("reasoning_content", ""), "")
    for i in range(len(text) + 1):
        assert read(reader(template), [text[:i], text[i:]]) == expected
    assert read(reader(template), list(text)) == expected
    at = text.index("echo") + 4
    (call,) = read(reader(template), text[:at], ended=False).calls
    assert call.name == "bash"
    assert call.arguments.endswith("echo")
    for n in range(0, len(text), 3):  # an answer that is cut off
        cut = read(reader(template), [text[:n]])
        assert expected.calls[0].arguments.startswith(cut.calls[0].arguments if cut.calls else "")


@pytest.mark.parametrize("name", PUBLISHED)
def test_other_words_stay_as_they_are(name: str) -> None:
    calls = form(PUBLISHED[name]).calls
    assert calls is not None
    start = calls.trigger
    for text in (
        "Plain.",
        f"{start} and so on",
        f"a {start}{start}",
        f"{start}rm",
        calls.begins,
        f"x {calls.begins}rm",
    ):
        for parts in ([text], list(text)):
            found = read(reader(PUBLISHED[name]), parts)
            assert (found.text, found.calls) == (text, [])


@pytest.fixture(scope="module")
def allows() -> Callable[[str | None, str], bool]:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")

    def allowed(grammar: str | None, text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        data = list(text.encode())
        return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())

    return allowed


UNBOUND = ("mistral-nemo", "command-r7b", "kimi-k3")  # ids; and what has words only within marks


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in UNBOUND])
def test_a_grammar_forces_what_the_template_renders(name: str, allows: Callable[[str | None, str], bool]) -> None:
    template = PUBLISHED[name]
    calls = form(template).calls
    one, two = answer(template, [BASH]), answer(template, [BASH, ("read_file", {"command": "f", "more": {}})])
    grammar = tool_grammar(calls, TOOLS, "required")
    assert allows(grammar, one)
    assert allows(grammar, two)
    assert not allows(tool_grammar(calls, TOOLS, "required", parallel=False), two)
    for wrong in (one.replace("3", "x"), one.replace("bash", "rm"), "words", answer(template, [("bash", {})])):
        assert not allows(grammar, wrong)
    strict = checked([Tool.model_validate({"type": "function", "function": {**TOOLS[0]["function"], "strict": True}})])
    for text in ("Words.", f"Words.\n{one}"):
        assert allows(tool_grammar(calls, strict, "auto"), text)
    assert not allows(tool_grammar(calls, strict, "auto"), one.replace("3", "x"))


def test_words_and_calls_of_kimi_k3_stand_within_marks(allows: Callable[[str | None, str], bool]) -> None:
    template = PUBLISHED["kimi-k3"]
    found = form(template).calls
    text = answer(template, [BASH])
    words = "<|open|>response<|sep|>Words.<|close|>response<|sep|>"
    assert text.startswith("<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>")
    grammar = tool_grammar(found, TOOLS, "required")
    assert allows(grammar, text)
    assert not any(allows(grammar, wrong) for wrong in (words, text.replace('"number"', '"string"'), "Words."))
    strict = checked([Tool.model_validate({"type": "function", "function": {**TOOLS[0]["function"], "strict": True}})])
    assert all(allows(tool_grammar(found, strict, "auto"), each) for each in (words, text))
    for parts in ([words], list(words)):
        assert read(reader(template), parts) == Read("Words.")
    assert thoughts_end(template, "") == ("<|close|>think<|sep|>", "<|open|>response<|sep|>")


def test_tags_within_tags_are_bound_by_their_schema(allows: Callable[[str | None, str], bool]) -> None:
    """MiniMax M3's objects and lists; read without a schema, tags alone say what is a list."""
    template = PUBLISHED["minimax-m3"]
    step = {"type": "object", "properties": {"file": {"type": "string"}, "line": {"type": "integer"}},
            "required": ["file"]}  # fmt: skip
    schema = {"type": "object", "properties": {"steps": {"type": "array", "items": step}}, "required": ["steps"]}
    tools = checked([Tool.model_validate({"type": "function", "function": {"name": "bash", "parameters": schema}})])
    arguments = {"steps": [{"file": "a<b>", "line": 3}, {"file": "12"}]}
    text = answer(template, [("bash", arguments)])
    grammar = tool_grammar(form(template).calls, tools, "required")
    assert allows(grammar, text)
    assert not allows(grammar, text.replace("<line>3", "<line>x"))
    for schemas, read_as in (({"bash": schema}, "12"), (None, 12)):
        parser = parser_for(template, tools=True, reasoning=True, tool_id=str, schemas=schemas)
        arguments["steps"][1]["file"] = read_as  # type: ignore[index]
        assert values(read(parser, list(text))) == [("bash", arguments)]


@pytest.mark.parametrize("template", [GIGACHAT3, COMMAND_R_PLUS, FIREFUNCTION, LLAMA_CPP_R1, PHI35, GEMMA2])
def test_templates_that_ask_for_more_than_others(template: str) -> None:
    """Arguments' descriptions, tools as text, Jinja's own lists; or that have no place for tools, or for a system."""
    found = form(template)
    calls = [BASH, ("read_file", {"command": "f"})][: 1 if found.calls is not None and found.calls.single else 2]
    text = answer(template, calls)
    for parts in ([text], list(text)):
        whole = read(reader(template), parts)
        assert (values(whole), whole.text.strip()) == (calls, "")
    system = [Message(role="system", content="Be kind."), Message.model_validate(QUESTION)]
    for tools in ([], TOOLS):
        talk = conversation(system, template, tools)
        prompt = compiled(template).render(talk.messages, tools=talk.tools)
        assert "Be kind." in prompt
        assert not tools or "read_file" in prompt or template is COMMAND_R_PLUS


def test_values_between_tags_get_the_types_of_their_schema() -> None:
    schema = {
        "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["number", "null"]},
            "e": {"enum": ["1", "2"]}, "k": {"enum": [1, 2]}, "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        }
    }  # fmt: skip
    written = {"s": "12", "i": "4.0", "n": "None", "e": "1", "k": "2", "u": "7", "x": "[1, 'a']", "y": "true?"}
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items()
    )
    parser = parser_for(
        PUBLISHED["qwen3-coder"], tools=True, reasoning=True, tool_id=str, schemas={"f": schema}
    )  # fmt: skip
    (call,) = read(parser, list(text + "</function>\n</tool_call>")).calls
    assert json.loads(call.arguments) == {
        "s": "12", "i": 4, "n": None, "e": "1", "k": 2, "u": 7, "x": [1, "a"], "y": "true?",
    }  # fmt: skip


def test_ends_within_a_text_are_text() -> None:
    """The last one before another argument, or the call's end, is the text's."""
    schema = {"properties": {"s": {"type": "string"}, "t": {"type": "string"}}}
    values = {"s": "print('</parameter>')\n</parameter> y\n</function", "t": "a\n</parameter>\n\n</p"}
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{lines}</function>\n</tool_call>"
    for parts in ([text], list(text)):
        parser = parser_for(PUBLISHED["qwen3-coder"], tools=True, reasoning=True, tool_id=str, schemas={"f": schema})
        found = read(parser, parts)
        assert [json.loads(call.arguments) for call in found.calls] == [values]
        assert not found.text


def test_marks_that_models_forget() -> None:
    """Qwen3-Coder leaves out ``<tool_call>``, DeepSeek the section, Mistral the id."""
    for name, text in {
        "qwen3-coder": "I look.\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        "deepseek-v3.1": 'I look.<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜>',
        "mistral-3.2": 'I look.[TOOL_CALLS]bash[ARGS]{"command": "ls"}',
    }.items():
        expected = Read("I look.", "", [Call("c0", "bash", '{"command": "ls"}')])
        assert read(reader(PUBLISHED[name]), list(text)) == expected


def test_lfm2_gets_its_calls_in_the_text() -> None:
    text = answer(LFM2, [BASH, ("read_file", {"command": "it's"})])
    assert text.startswith("<|tool_call_start|>[bash(command=")
    for parts in ([text], list(text)):
        assert values(read(reader(LFM2), parts)) == [BASH, ("read_file", {"command": "it's"})]


def test_gpt_oss_answers_in_channels() -> None:
    assert format_of(GPT_OSS).calls is HARMONY
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}'
    found = Read("", "Hm.", [Call("c0", "bash", '{"command": "ls"}')])
    for text, expected in {
        f"{thought}<|channel|>final<|message|>Yes.<|return|>": Read("Yes.", "Hm."),
        f"{thought}{call}<|call|>": found,
        f"{thought}{call}": found,
        f'{thought} to=functions.bash<|channel|>commentary json<|message|>{{"command": "ls"}}': found,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call: Read("I look.", "", found.calls),
        "Yes.": Read("Yes."),
        "<|channel|>final<|message|>It is <|": Read("It is <|"),
    }.items():
        for i in range(len(text)):
            assert read(reader(GPT_OSS), [text[:i], text[i:]]) == expected, text
    sent = conversation(
        [
            Message.model_validate(each)
            for each in (
                QUESTION,
                {"role": "assistant", "tool_calls": [
                    {"id": str(i), "type": "function", "function": {"name": "bash", "arguments": "{}"}} for i in (1, 2)
                ]},
                {"role": "tool", "tool_call_id": "2", "content": "two"},
                {"role": "tool", "tool_call_id": "1", "content": "one"},
            )
        ],
        GPT_OSS,
        TOOLS,
    )  # fmt: skip
    assert [m["content"] for m in sent.messages] == ["Well?", "", "one", "", "two"]
    assert sent.tools


def test_grammars_of_channels_begin_after_the_analysis() -> None:
    """JSON in the channel ``final``, or a call; not before, and in no other channel."""
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(resolve("demo").path))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)

    def allowed(grammar: Grammar, text: str) -> bool:
        state = grammar.start(np.array([1], np.int32))
        for token in tokenizer.encode(text, add_special=False).tolist():
            if not grammar.allows(state, token):
                return False
            state = grammar.advance(state, token)
        return grammar.allows(state, tokenizer.eos_ids[0])

    thought = "<|channel|>analysis<|message|>Hm. <b>\n<|end|><|start|>assistant"
    final, call = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
    made = grammars.json_object(after=thoughts_end(GPT_OSS, ""))
    assert allowed(made, f"{thought}{final}{{}}")
    assert not any(allowed(made, text) for text in (f"{thought}{{}}", "{}", f"{thought}{final}x", f"{final}{{}}"))
    lark = tool_grammar(HARMONY, TOOLS, "required", literal=grammars.literal)
    assert lark is not None
    calls = grammars.lark(lark, after=thoughts_end(GPT_OSS, "", calls=True))
    arguments = json.dumps({"command": "ls"})
    assert allowed(calls, thought + call + arguments)
    assert not any(allowed(calls, text) for text in (call + arguments, thought + call + "{}", f"{thought}{final}x"))


def test_mistral_is_read_as_mistral_writes_it() -> None:
    """``mistral_common`` is Mistral's own: what it makes of a conversation, as text."""
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")
    from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall

    made = [
        ToolCall(id=f"abcdefgh{i}", function=FunctionCall(name=name, arguments=json.dumps(its)))
        for i, (name, its) in enumerate([BASH, ("read_file", {"command": "f"})])
    ]
    results = [ToolMessage(tool_call_id=call.id, content="x", name=call.function.name) for call in made]
    sent = ChatCompletionRequest(messages=[UserMessage(content="Well?"), AssistantMessage(tool_calls=made), *results])
    path = str(files("mistral_common") / "data" / "tekken_240911.json")
    text = mistral.MistralTokenizer.from_file(path).encode_chat_completion(sent).text
    text = text[text.index("[TOOL_CALLS]") : text.index("</s>")]
    assert values(read(reader(PUBLISHED["mistral-nemo"]), list(text))) == [BASH, ("read_file", {"command": "f"})]
