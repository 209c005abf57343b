"""Tools and reasoning: what answers are taken apart into, what templates are given, and what grammars allow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.engine.results import Delta
from outpace.errors import GrammarError, ParameterError
from outpace.server.conversation.binding import tool_grammar
from outpace.server.conversation.formats import format_of, parser_for, thoughts_end, thoughts_opened
from outpace.server.conversation.messages import Message, conversation
from outpace.server.conversation.pieces import Call, Incremental, OutputParser, Plain, json_object
from outpace.server.conversation.spelling import GEMMA3, HERMES, LFM2, LLAMA3, SMOLLM2, Spelling
from outpace.server.conversation.tools import (
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    checked,
    schemas_of,
)
from outpace.server.conversation.values import typed, types_of
from outpace.server.engines.generation import Choice
from outpace.text.chat_template import ChatTemplate
from outpace.text.expressed import expressed, loosened
from outpace.text.grammar import Thoughts
from outpace.text.schemas import check
from tests.server import formats
from tests.server.formats import BOTH, CITY, NAMES, NOW, PYTHON, TEMPLATES, WEATHER, Read, read
from tests.server.published import LFM2 as LFM2_TEMPLATE
from tests.server.published import PUBLISHED

KINDS = ("llama3", "qwen3", "gemma3", "smollm2")
ABC = ("llama3", "qwen3", "gemma3")  # whose parsers differ
BOS = {"bos_token": "<s>"}


def make(kind: str, *, names: dict[str, Any] | None = NAMES, prompt: str = "", reasoning: bool = False) -> OutputParser:
    template = TEMPLATES[kind]
    return parser_for(template, tools=True, reasoning=reasoning, tool_id="c{}".format, prompt=prompt, schemas=names)


def calls_of(kind: str) -> Spelling:
    found = format_of(TEMPLATES[kind]).calls
    assert found is not None
    return found


def cut(text: str, at: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(at), len(text)])]


def weather(text: str = CITY, index: int = 0) -> Call:
    return Call(f"c{index}", "get_weather", text)


# What the formats are.


@pytest.mark.parametrize(
    ("kind", "text"), [*BOTH.items(), ("gemma3", PYTHON), ("gemma3", f"```tool_code\n{PYTHON}\n```")]
)
def test_two_calls_wherever_the_text_is_cut(kind: str, text: str) -> None:
    """Every cut into three, every cut into single characters."""
    expected = Read(calls=[weather(), Call("c1", "now", "{}")])
    assert read(make(kind), list(text)) == expected
    for i in range(len(text)):
        for j in range(i, len(text), 7):
            assert read(make(kind), cut(text, [i, j])) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_leave_while_they_are_written(kind: str) -> None:
    """Nothing of an argument waits for what follows it, so pieces join to exactly what was shown before."""
    text = BOTH[kind]
    begin = text.index(CITY) + 1
    for n in range(len(CITY)):
        call = read(make(kind), text[: begin + n], ended=False).calls[0]
        assert (call.name, call.arguments) == ("get_weather", CITY[: n + 1])


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        # words around calls; white space between is the format's
        ("qwen3", "Let me see.\n\n<tool_call>{C}</tool_call>\n", Read("Let me see.", "", [weather()])),
        ("qwen3", "<tool_call>{C}</tool_call>\nDone. ", Read("\nDone. ", "", [weather()])),
        # but not without end
        ("qwen3", "\n" * 70 + "<tool_call>{C}</tool_call>", Read("\n" * 6, "", [weather()])),
        ("qwen3", "<tool_call>{C}</tool_call>" + "\n" * 70, Read("\n" * 70, "", [weather()])),
        # keys in any order, arguments as a string, null or nothing, several in a tag
        ("qwen3", '<tool_call>{"arguments": {A}, "name": "get_weather"}</tool_call>', Read(calls=[weather()])),
        (
            "qwen3",
            '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}',
            Read(calls=[Call("c0", "now", '{"a": 1}')]),
        ),
        ("qwen3", '<tool_call>{"name": "now", "arguments": null}', Read(calls=[Call("c0", "now", "{}")])),
        (
            "qwen3",
            '<tool_call>{"name": "now"}\n{C}</tool_call>',
            Read(calls=[Call("c0", "now", "{}"), weather(index=1)]),
        ),
        # raw control characters, which JSON forbids
        (
            "qwen3",
            '<tool_call>{"name": "now", "arguments": {"a": "x\n\ty"}}',
            Read(calls=[Call("c0", "now", '{"a": "x\\n\\ty"}')]),
        ),
        # cut off
        ("qwen3", "<tool_call>{C}</tool_", Read(calls=[weather()])),
        ("qwen3", '<tool_call>{"name": "get_weather", "arg', Read('<tool_call>{"name": "get_weather", "arg')),
        (
            "qwen3",
            '<tool_call>{"name": "now", "arguments": {"a": "\\u00',
            Read(calls=[Call("c0", "now", '{"a": "\\u00')]),
        ),
        ("qwen3", '<tool_call>{C}\n{"name": "n', Read('\n{"name": "n', "", [weather()])),
        # malformed: before a call is certain all of it is text, afterwards the rest is
        ("qwen3", "<tool_call>none</tool_call> ", Read("<tool_call>none</tool_call> ")),
        ("qwen3", "<tool_call>[]</tool_call>", Read("<tool_call>[]</tool_call>")),
        ("qwen3", '<tool_call>{"name": "rm", "arguments": {}}', Read('<tool_call>{"name": "rm", "arguments": {}}')),
        ("qwen3", '<tool_call>{"name": "\\ud800"}', Read('<tool_call>{"name": "\\ud800"}')),
        (
            "qwen3",
            '<tool_call>{"name": "now", "arguments": {"a": 01}}',
            Read("}}", "", [Call("c0", "now", '{"a": 01')]),
        ),
        ("qwen3", "<tool_call>x <tool_call>{C}", Read("<tool_call>x", "", [weather()])),
        ("llama3", "\n {P} ", Read(calls=[weather()])),
        (
            "llama3",
            '<|python_tag|>{"type": "function", "function": "x"}',
            Read('<|python_tag|>{"type": "function", "function": "x"}'),
        ),
        ("llama3", "I call <function=get_weather>{A}</function>", Read("I call", "", [weather()])),
        ("llama3", "[{P}, {P}]", Read(calls=[weather(), weather(index=1)])),
        ("llama3", '{"name": "Alice", "age": 3}', Read('{"name": "Alice", "age": 3}')),
        ("llama3", "{P} and so on", Read(" and so on", "", [weather()])),
        ("llama3", "\n\nWell.", Read("\n\nWell.")),
        ("gemma3", "Yes:\n```json\n{C}\n```\n", Read("Yes:", "", [weather()])),
        ("gemma3", '```json\n{"a": 1}\n```', Read('```json\n{"a": 1}\n```')),
        (
            "gemma3",
            "```tool_code\nprint(now(a='\"', b=[True, None,], c={'d': -1.5e3,},))\n```",
            Read(calls=[Call("c0", "now", '{"a": "\\"", "b": [true, null], "c": {"d": -1.5e3}}')]),
        ),
        ("gemma3", "[now(a='\\x41\\d\\u00e9')]", Read(calls=[Call("c0", "now", '{"a": "A\\\\d\\u00e9"}')])),
        ("gemma3", "[1] now(3)", Read("[1] now(3)")),
        ("gemma3", "[now(a=1), rm(b=2)]", Read(", rm(b=2)]", "", [Call("c0", "now", '{"a": 1}')])),
    ],
)
def test_what_a_text_says(kind: str, text: str, expected: Read) -> None:
    """{C} and {P} stand for a call of each spelling, {A} for its arguments."""
    text = text.replace("{C}", formats.F).replace("{P}", formats.F.replace("arguments", "parameters"))
    text = text.replace("{A}", CITY)
    assert read(make(kind), [text]) == expected
    assert read(make(kind), list(text)) == expected


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nWell, <b>\n</think>\n\nYes\n", False, Read("Yes\n", "Well, <b>")),
        ("\n<think>\n\n</think>\n\nYes", False, Read("Yes")),
        ("Yes <think>no</think>", False, Read("Yes <think>no</think>")),
        ("<thing", False, Read("<thing")),
        ("<think>cut</th", False, Read("", "cut</th")),
        ("Well\n</think>Yes", True, Read("Yes", "Well")),
        ("<think>Well</think>Yes", True, Read("Yes", "Well")),
        (
            '<think>a <tool_call> b</think>\n<tool_call>{"name": "now"}',
            False,
            Read("", "a <tool_call> b", [Call("c0", "now", "{}")]),
        ),
    ],
)
def test_thoughts_come_off_the_beginning(text: str, opened: bool, expected: Read) -> None:
    prompt = "<|im_start|>assistant\n<think>\n" if opened else ""
    for parts in ([text], list(text), *(cut(text, [i]) for i in range(len(text)))):
        assert read(make("qwen3", reasoning=True, prompt=prompt), parts) == expected


# What must hold of any text.

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<function=", "</function>", "<", ">"]
FENCED = ["```json", "```tool_code", "```", "`", "now(", "a=", "print(", ")", "'", "True"]
JSON = ['{"name":"', "now", '","arguments":', '"parameters":', "{", "}", "[", "]", '"', ",", ":", ";", "1", "-", "tru"]
PARTS = [*TAGS, *FENCED, *JSON, "null", "\\", "\\u00e", "é", "日", "😀", " ", "\n"]
pieces = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=25).map("".join)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(ABC), pieces, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
@example("qwen3", "<tool_call>" * 3 + '{"name":' * 40, [5], False, False)
@example("gemma3", "[now(a=" + "[" * 200, [], False, False)
def test_any_text_any_cut(kind: str, text: str, at: list[int], reasoning: bool, known: bool) -> None:
    """The same pieces once joined, nothing raises, and a text without calls or thoughts stays as it is."""

    def parser() -> OutputParser:
        return make(kind, names=NAMES if known else None, reasoning=reasoning)

    whole = read(parser(), [text])
    assert read(parser(), cut(text, at)) == whole
    assert read(parser(), list(text)) == whole
    if not whole.calls and not (reasoning and "<think>" in text):
        assert whole.text == text
    json.dumps([whole.text, whole.thoughts, *(call.arguments for call in whole.calls)], ensure_ascii=False).encode()


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=8,
)
keywords = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), values, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.lists(keywords, min_size=1, max_size=3), st.integers(1, 9))
def test_calls_come_back_as_they_were_written(kind: str, arguments: list[dict[str, Any]], step: int) -> None:
    calls = [{"function": {"name": "now", "arguments": its}} for its in arguments]
    texts = [calls_of(kind).write(calls)]
    if kind == "gemma3":
        texts.append("[" + ", ".join(f"now({', '.join(f'{k}={v!r}' for k, v in a.items())})" for a in arguments) + "]")
    for text in texts:
        found = read(make(kind), [text[i : i + step] for i in range(0, len(text), step)])
        assert [json.loads(call.arguments) for call in found.calls] == arguments
        assert not found.text
    assert [call.arguments for call in read(make(kind), texts[:1]).calls] == [
        json.dumps(its, ensure_ascii=False) for its in arguments
    ]


@pytest.mark.parametrize("kind", ["qwen3", "smollm2", "gemma3"])
def test_beside_a_format_only_an_answer_that_begins_with_a_call_has_calls(kind: str) -> None:
    def parser() -> OutputParser:
        return parser_for(TEMPLATES[kind], tools=True, reasoning=False, tool_id="c{}".format, formatted=True)

    for text in (f' {{"note": "{BOTH[kind]}"}}', f'"{BOTH[kind]}"', " ", ""):
        assert read(parser(), list(text)) == read(parser(), [text]) == Read(text)
    calls = Read(calls=[weather(), Call("c1", "now", "{}")])
    assert read(parser(), list("\n" + BOTH[kind])) == read(parser(), ["\n" + BOTH[kind]]) == calls


def test_nothing_said_is_kept_longer_than_needed() -> None:
    """A parser holds what is undecided, not the answer; words leave as they come."""
    parser = make("qwen3")
    assert isinstance(parser, Incremental)
    for _ in range(100):
        assert parser.feed("words and <b>, ")
    assert len(parser._source.text) < 50
    parser.feed('<tool_call>{"name": "now", "arguments": {"a": "')
    for _ in range(100):
        parser.feed("x" * 50)
    assert len(parser._source.text) <= 50


# Templates.


def messages(*given: dict[str, Any]) -> list[Message]:
    return [Message.model_validate_json(json.dumps(each)) for each in given]


def tools(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return checked([Tool.model_validate_json(json.dumps(each)) for each in given])


def named(name: str) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=name))


HELLO = messages({"role": "user", "content": "hi"})


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_known_by_their_templates(kind: str) -> None:
    found = format_of(TEMPLATES[kind])
    known = {"llama3": LLAMA3, "qwen3": HERMES, "gemma3": GEMMA3, "smollm2": SMOLLM2}
    assert found.calls == known[kind]
    assert (found.takes_tools, found.writes_calls) == (kind in ("llama3", "qwen3"),) * 2
    assert (found.thinks, found.may_think) == ((kind == "qwen3"),) * 2


def test_other_templates() -> None:
    assert format_of(formats.HERMES).calls == format_of(formats.HERMES_TOOLS).calls == HERMES
    for template in (None, "{{ messages }}", formats.CODER, "{% broken"):
        assert format_of(template).calls is None
        assert isinstance(parser_for(template, tools=True, reasoning=True, tool_id=str), Plain)
    assert format_of(formats.OPENING).thinks


def test_thoughts_are_opened_by_the_prompt_or_by_the_model() -> None:
    hello = [{"role": "user", "content": "hello <think>"}]
    opening = ChatTemplate(formats.OPENING, {}).render(hello)
    assert thoughts_opened(formats.OPENING, opening)
    qwen = ChatTemplate(formats.QWEN3, {})
    plain, off = qwen.render(hello), qwen.render(hello, enable_thinking=False)
    assert not thoughts_opened(formats.QWEN3, plain)
    assert not thoughts_opened(formats.QWEN3, off)
    assert thoughts_end(formats.OPENING, opening) == "</think>"
    assert thoughts_end(formats.QWEN3, plain) == Thoughts("<think>", "</think>")
    assert thoughts_end(formats.QWEN3, off) is thoughts_end(formats.HERMES, plain) is None


HISTORY: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": CITY}},
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{oops"}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("kind", [*KINDS, "hermes", "hermes with tools"])
def test_a_conversation_with_calls_is_told_whole(kind: str) -> None:
    """Every template takes it, in order, and the calls in it are those that the format's parser reads."""
    template = {**TEMPLATES, "hermes": formats.HERMES, "hermes with tools": formats.HERMES_TOOLS}[kind]
    given_ = conversation(messages(*HISTORY), template, tools(WEATHER, NOW))
    prompt = ChatTemplate(template, BOS).render(given_.messages, tools=given_.tools)
    told_ = ["kind.", "Weather?", "get_weather", "now", "noon", "Thanks."]
    if kind == "llama3":  # each call with its own result
        told_ = ["kind.", "Weather?", "get_weather", "rain", "now", "noon", "Thanks."]
    assert prompt.count("noon") == prompt.count("rain") == 1
    ends = prompt.index("Weather?")
    assert "Be\nkind." in prompt
    places = [prompt.index("kind.")] + [prompt.index(word, ends) for word in told_[1:]]
    assert places == sorted(places)
    assert CITY in prompt
    assert "Weather in a city" in prompt
    assert (given_.tools is None) == (kind in ("gemma3", "smollm2", "hermes"))
    assert (prompt.count("<tool_response>") == 2) == (kind != "llama3")


def test_no_tools_are_offered_under_none() -> None:
    for template in TEMPLATES.values():
        found = conversation(HELLO, template, tools(WEATHER), "none")
        assert found.tools is None
        assert found.messages == [{"role": "user", "content": "hi"}]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("make_", "parameter", "word"),
    [
        (lambda: conversation(messages({"role": "user"}), None), "messages.0.content", "text"),
        (
            lambda: conversation(messages({"role": "tool", "content": "x", "tool_call_id": "z"}), None),
            "messages.0.tool_call_id",
            "z",
        ),
        (
            lambda: conversation(messages({"role": "user", "content": "x", "tool_calls": [CALL]}), None),
            "messages.0.tool_calls",
            "assistant",
        ),
        (lambda: conversation(HELLO, None, tools(NOW)), "tools", "template"),
        (
            lambda: conversation(messages({"role": "assistant", "tool_calls": [CALL]}), "{{ messages }}"),
            "messages",
            "template",
        ),
        (lambda: conversation(HELLO, formats.QWEN3, (), "required"), "tool_choice", "needs"),
        (lambda: tool_grammar(HERMES, tools(NOW), named("g")), "tool_choice", "now"),
        (lambda: tool_grammar(None, tools(NOW), "required"), "tool_choice", "template"),
        (lambda: tools(NOW, NOW), "tools.1.function.name", "twice"),
    ],
)
def test_what_is_refused_is_named(make_: Callable[[], Any], parameter: str, word: str) -> None:
    with pytest.raises(ParameterError) as caught:
        make_()
    assert caught.value.parameter == parameter
    assert word in str(caught.value)


# Grammars.


@pytest.fixture(scope="module")
def allows() -> Callable[[str | None, str], bool]:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")

    def allowed(grammar: str | None, text: str) -> bool:
        """Whether the grammar allows the whole text, and that it ends there."""
        assert grammar is not None
        matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        data = list(text.encode())
        return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())

    return allowed


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_binds_the_answer(kind: str, allows: Callable[[str | None, str], bool]) -> None:
    both = tools(WEATHER, NOW)

    def calls(*which: tuple[str, dict[str, Any]]) -> str:
        return calls_of(kind).write([{"function": {"name": name, "arguments": its}} for name, its in which])

    right, now = calls(("get_weather", {"city": "Zürich"})), calls(("now", {}))
    two = calls(("get_weather", {"city": "日", "days": 1}), ("now", {}))
    wrong = [
        calls(("get_weather", {"days": 1})),
        calls(("get_weather", {"city": "x" * 21})),
        calls(("rm", {})),
        right + right,
        right + " done",
        right[:-1],
        calls(("now", {"a": 1})),
    ]
    choices: list[tuple[ToolChoice, bool, bool]] = [
        ("required", True, False), ("required", False, False), ("auto", True, True), ("auto", False, True)
    ]  # fmt: skip
    for choice, parallel, words in choices:
        grammar = tool_grammar(calls_of(kind), both, choice, parallel=parallel)
        assert allows(grammar, right)
        assert allows(grammar, now)
        assert allows(grammar, two) == parallel
        assert not any(allows(grammar, each) for each in wrong)
        assert allows(grammar, "Plain words, 日本.") == allows(grammar, "") == words
        if kind == "llama3":
            assert not allows(grammar, "Words, then <function=now>{}</function>")
        else:
            assert allows(grammar, "Words, then:\n" + two) == (words and parallel)
    grammar = tool_grammar(calls_of(kind), both, named("now"))
    assert allows(grammar, now)
    assert not any(allows(grammar, each) for each in (right, two, "words", ""))
    assert tool_grammar(calls_of(kind), both, "none") is tool_grammar(calls_of(kind), tools(NOW), "auto") is None
    beside = tool_grammar(calls_of(kind), both, "auto", part=True)
    assert beside is not None
    beside = beside.replace("@part", '"yes" | "no"')
    assert all(allows(beside, each) for each in (right, two, "yes", "no"))
    assert not any(allows(beside, each) for each in ("words", "", "yes" + right, right + "yes"))
    assert "@part" not in (tool_grammar(calls_of(kind), both, "required", part=True) or "@part")
    assert read(make(kind, names=schemas_of(both)), list(two)).calls[1] == Call("c1", "now", "{}")


CIRCLE = {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize("spelling", [HERMES, format_of(PUBLISHED["qwen3-coder"]).calls, LFM2], ids=str)
@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$ref"),
        (CIRCLE, "$ref"),
        ({"required": 5}, "required"),
        ({"required": [{}]}, "required"),
        ({"properties": ["x"]}, "properties"),
        ({"properties": {"x": {"type": [["string"]]}}}, "type"),
        ({"properties": 5, "propertyNames": {"enum": ["a"]}}, "properties"),
        ({"properties": {"x": {"anyOf": [5]}}}, "anyOf"),
    ],
)
def test_a_schema_of_wrong_types_is_refused_by_its_keyword(
    spelling: Spelling, schema: dict[str, Any], word: str
) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ParameterError, match=rf"tools\.0\.function\.parameters.* JSON schema's {re.escape(word)} "):
        tool_grammar(spelling, tools(function), "required")
    with pytest.raises(GrammarError, match=rf"JSON schema's {re.escape(word)} "):
        check(schema)


def test_types_are_found_in_time_that_grows_with_the_schema() -> None:
    wide = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 40}}}
    assert types_of({"$ref": "#/$defs/a"}, wide) == frozenset()
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        deep = {"oneOf": [deep] * 30}
    assert types_of(deep, deep) == {"string"}
    assert types_of({"type": [["string"]]}, {}) == types_of({"const": 1, "enum": 5}, {}) == frozenset()


@pytest.mark.parametrize("text", ["1e999", "[1e999]", '["\\ud83d"]', "{'a': '\\ud800'}"])
def test_what_json_does_not_have_stays_text(text: str) -> None:
    for kind in ("number", "array", "object"):
        assert json.loads(typed(text, frozenset({kind}))) == text
    assert json_object('{"a": [1e999, "\\ud83d", "\\ud83d\\ude00", "\\\\ud83d"]}') == {
        "a": ["1e999", "\ufffd", "\U0001f600", "\\ud83d"]
    }


@pytest.mark.parametrize(
    ("pattern", "without"),
    [
        (r"\(?=x", r"\(?=x"),
        (r"[(?=]+", r"[(?=]+"),
        (r"a\\(?=b)c", r"a\\c"),
        (r"(?:(?!x[)\]](y))z)+", r"(?:z)+"),
        (r"a(?=b)*c(?<!x){2,3}?d", r"acd"),
        (r"(?<=a", r"(?<=a"),
    ],
)
def test_look_around_is_left_out_and_nothing_else(pattern: str, without: str) -> None:
    left_out: list[str] = []
    data = {"const": {"pattern": "(?=a)b"}, "enum": [{"pattern": "(?=a)b"}], "default": {"pattern": "(?=a)"}}
    schema = {"properties": {"const": {"pattern": pattern}}, **data}
    assert loosened(schema, left_out) == {"properties": {"const": {"pattern": without}}, **data}
    assert len(left_out) == (pattern != without)
    names = {"propertyNames": {"enum": ["a"]}}
    assert expressed({"const": names, "properties": {"default": names}})["const"] == names


@pytest.mark.parametrize(
    ("text", "stopped_by", "finish"),
    [
        ("<function=f>\n<parameter=a>\n[1,2", 0, "length"),
        ("<function=f>\n<parameter=a>\n[1,2", "2", "stop"),
        ("<function=f>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>", 0, "tool_calls"),
    ],
)
def test_a_call_that_the_answers_end_cuts_is_no_call(text: str, stopped_by: int | str, finish: str) -> None:
    parser = parser_for(PUBLISHED["qwen3-coder"], tools=True, reasoning=False, tool_id=str, schemas={"f": {}})
    choice, result = Choice(0, parser), SimpleNamespace(finish_reason="stop", stopped_by=stopped_by)
    choice.feed(Delta(0, 0, f"<tool_call>\n{text}", (), ()))
    part = choice.feed(Delta(0, 0, "", (), (), finish_reason="stop", result=result))  # type: ignore[arg-type]
    assert (part.finish, part.stop_reason) == (finish, stopped_by)


def test_names_are_as_long_as_requests_may_have_them() -> None:
    name = "n" * 128
    function = Tool.model_validate({"type": "function", "function": {"name": name}}).function
    tagged = f"<tool_call>\n<function={name}>\n</function>\n</tool_call>"
    for template in (*formats.TEMPLATES.values(), PUBLISHED["qwen3-coder"], LFM2_TEMPLATE):
        spelling = format_of(template).calls
        assert spelling is not None
        parser = parser_for(template, tools=True, reasoning=False, tool_id=str, schemas={name: {}})
        written = spelling.write([{"function": {"name": function.name, "arguments": {}}}])
        text = tagged if spelling.kind == "tags" else written
        assert [call.name for call in read(parser, [text]).calls] == [name]


def test_what_is_not_strict_may_have_a_schema_that_no_grammar_knows(allows: Callable[[str | None, str], bool]) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer"}}, "if": {"required": ["a"]}}
    function = {"type": "function", "function": {"name": "f", "parameters": odd}}
    grammar = tool_grammar(HERMES, tools(function), "required")
    assert allows(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
