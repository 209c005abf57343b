"""``/v1/responses`` through the openai client: a chat's tokens, as items; streamed they are the unstreamed ones."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.engine import core
from outpace.errors import RuleError
from outpace.server.api.responses import ResponseEncoder, ResponsesRequest, as_chat
from outpace.server.conversation.formats import parser_for
from outpace.server.conversation.pieces import Segmenter
from outpace.server.engines.generation import Part
from tests.server import formats
from tests.server.serving import Running

SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
ASKED: list[dict[str, Any]] = [
    {"instructions": "Be brief.", "temperature": 0, "max_output_tokens": 9},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 9},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 40},
    {"text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}, "max_output_tokens": 40},
]
INPUT = "Name three rivers."
ANSWER = (
    '<think>\nTwo calls.\n</think>\n\nLet me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def said(cuts: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """The answer fed in parts: its output, and its events."""
    parser = parser_for(formats.QWEN3, tools=True, reasoning=True, tool_id=lambda i: f"call_{i}")
    generation: Any = SimpleNamespace(id="resp_x", resumed={})
    segmenter, encoder = Segmenter(), ResponseEncoder(generation, ResponsesRequest(input="x"))
    fed = [parser.feed(ANSWER[start:end]) for start, end in itertools.pairwise((0, *cuts, len(ANSWER)))]
    parts = [Part(0, segmenter.feed(pieces)) for pieces in fed]
    ended: Any = object()
    parts.append(Part(0, segmenter.feed(parser.finish(), last=True), finish="stop", result=ended))
    lines = b"".join(encoder.part(part) for part in parts).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return [item.to_dict() for item in encoder.items()], events


def rebuilt(events: list[Any]) -> list[Any]:
    """What a client that reads events makes of them: nothing but what was added."""
    output: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append({**event["item"], "status": "completed"})
            continue
        its = output[event["output_index"]]
        if kind == "output_item.done":
            assert event["item"] == its
            continue
        assert event["item_id"] == its["id"]
        if kind == "content_part.added":
            assert event["content_index"] == len(its["content"]) == 0
            its["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            its["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == its["arguments"]
        elif kind.endswith("_text.delta"):
            its["content"][0]["text"] += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == its["content"][0]["text"]
        else:
            assert kind == "content_part.done"
            assert event["part"] == its["content"][0]
    return output


def test_items_are_the_same_however_the_answer_was_cut() -> None:
    whole, events = said(())
    assert [item["type"] for item in whole] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.get("arguments") for item in whole[2:]] == ['{"city": "Rome"}', '{"city": "Oslo"}']
    assert whole[1]["content"][0]["text"].strip() == "Let me look."
    assert rebuilt(events) == whole
    for cuts in [(i,) for i in range(1, len(ANSWER))] + [tuple(range(1, len(ANSWER), n)) for n in (1, 2, 3, 5, 8)]:
        output, events = said(cuts)
        assert output == whole
        assert rebuilt(events) == whole


def test_answers_go_back_as_they_came() -> None:
    """Items of an answer, then a call's output, are the chat that they came from."""
    output, _ = said(())
    sent = [
        {"role": "user", "content": "Go."}, *output,
        *({"type": "function_call_output", "call_id": f"call_{i}", "output": "sun"} for i in (0, 1)),
    ]  # fmt: skip
    chat = as_chat(ResponsesRequest.model_validate_json(json.dumps({"input": sent, "instructions": "Look."})))
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool", "tool"]
    answer = chat.messages[2]
    assert answer.reasoning_content == output[0]["content"][0]["text"]
    assert [call.id for call in answer.tool_calls or ()] == ["call_0", "call_1"]
    assert [message.tool_call_id for message in chat.messages[3:]] == ["call_0", "call_1"]


@pytest.mark.parametrize("more", ASKED)
def test_a_stream_is_the_answer_and_both_are_the_chats(demo: Running, more: dict[str, Any]) -> None:
    sent = {"model": "demo", "input": INPUT, "extra_body": {"seed": 5, "return_token_ids": True}, **more}
    whole = demo.client().responses.create(**sent).to_dict()
    events: list[Any] = [event.to_dict() for event in demo.client().responses.create(**sent, stream=True)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    same = ("output", "id", "created_at", "completed_at", "usage")
    streamed = last["response"]
    assert {k: v for k, v in streamed.items() if k not in same} == {k: v for k, v in whole.items() if k not in same}

    def nameless(items: Any) -> Any:
        return [{k: v for k, v in item.items() if k != "id"} for item in items]

    assert nameless(streamed["output"]) == nameless(whole["output"])
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == streamed["output"]
    told = [entry for e in events if e["type"] == "response.output_text.delta" for entry in e["logprobs"]]
    item: Any = streamed["output"][0]
    if "include" in more:
        assert told == item["content"][0]["logprobs"]
        assert len(told) == len(streamed["token_ids"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in told)

    chat: dict[str, Any] = {"seed": 5, "return_token_ids": True, "max_tokens": more["max_output_tokens"]}
    system = [{"role": "system", "content": more["instructions"]}] if "instructions" in more else []
    chat["messages"] = [*system, {"role": "user", "content": INPUT}]
    chat |= {name: more[name] for name in ("temperature", "tool_choice", "parallel_tool_calls") if name in more}
    if "tools" in more:
        chat["tools"] = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    if "text" in more:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    answer = demo.answer("/v1/chat/completions", chat)
    assert whole["token_ids"] == answer["choices"][0]["token_ids"]
    assert whole["prompt_token_ids"] == answer["prompt_token_ids"]
    message = answer["choices"][0]["message"]
    if "tools" in more:
        call = message["tool_calls"][0]
        assert (item["call_id"], item["arguments"]) == (call["id"], call["function"]["arguments"])
    else:
        assert item["content"][0]["text"] == message["content"]


def test_the_clients_own_helpers_read_it(demo: Running) -> None:
    """Its stream puts events together itself; a call's output goes back with the items it came with."""
    tool: Any = TOOL
    own = {"seed": 1, "return_progress": True}
    asked: Any = {"model": "demo", "tools": [tool], "max_output_tokens": 40, "extra_body": own}
    with demo.client().responses.stream(input=INPUT, tool_choice="required", **asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert kinds.count("response.in_progress") > 1  # its own, and one with the progress
    call: Any = final.output[0]
    assert list(call.parsed_arguments) == ["city"]
    back: list[Any] = [{"role": "user", "content": INPUT}, *(item.to_dict() for item in final.output)]
    for item in back[1:]:
        item.pop("parsed_arguments", None)
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."})
    assert demo.client().responses.create(input=back, tool_choice="none", **asked).output_text
    demo.at_rest()


def test_a_fault_in_mid_stream_is_told(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    original = core.Sequence.extended

    def faulty(self: Any, tokens: list[int]) -> Any:
        if self.request.seed == 13 and self.length > self.prompt_length + 3:
            raise RuleError("a rule broke")
        return original(self, tokens)

    monkeypatch.setattr(core.Sequence, "extended", faulty)
    asked: Any = {"model": "demo", "input": INPUT, "extra_body": {"seed": 13, "ignore_eos": True, "bad_words": ["q"]}}
    last = list(demo.client().responses.create(stream=True, **asked))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "a rule broke" in last.response.error.message
    assert [item.status for item in last.response.output if item.type == "message"] == ["incomplete"]
    demo.at_rest()


CODEX = {  # fields of its first request
    "client_metadata": {"x-codex-installation-id": "1"}, "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"], "store": False, "prompt_cache_key": "a", "text": {"verbosity": "low"},
    "parallel_tool_calls": True, "tool_choice": "auto",
}  # fmt: skip
ELSEWHERE = [
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [TOOL]},
    {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
]


@pytest.mark.parametrize("tools", [[TOOL], []])
def test_what_codex_asks_beside_changes_nothing(demo: Running, tools: list[dict[str, Any]]) -> None:
    body = {"input": INPUT, "max_output_tokens": 8, "seed": 1, "tools": tools}
    plain, answer = (
        demo.answer("/v1/responses", each) for each in (body, {**body, **CODEX, "tools": [*ELSEWHERE, *tools]})
    )
    assert answer["output"][-1]["content"] == plain["output"][-1]["content"]
    assert answer["usage"]["input_tokens"] == plain["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "long " * 3000}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input.0.call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "teleport"}]}, "tools.0"),
        ({"tools": [TOOL, {"type": "function", "name": "a b"}]}, "tools.1.name"),
        ({"tools": [TOOL], "include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"text": {"format": {"type": "json_schema", "name": "c", "schema": {"type": "x"}}}}, "text.format"),
        ({"speculation": {"trace": True}}, "speculation.trace"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_named(demo: Running, more: dict[str, Any], param: str) -> None:
    error = demo.answer("/v1/responses", {"input": INPUT, "max_output_tokens": 2, **more}, 400)["error"]
    assert error["param"] == param, error


def test_codexs_private_tools_are_refused_with_a_remedy(demo: Running) -> None:
    """As Codex 0.171 sends them to its default model."""
    tools = [{"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}]
    own = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": tools}
    body = {"model": "demo", "input": [own, {"type": "message", "role": "user", "content": "Hi"}]}
    error = demo.answer("/v1/responses", body, 400)["error"]
    assert error["param"] == "input"
    assert "codex -m NAME" in error["message"]
