"""``/v1/messages``: the same answers as chats', in Anthropic's form; its own package reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace import Engine
from tests.server.foreign import results_of
from tests.server.serving import Running, serving

PATH, CHAT = "/v1/messages", "/v1/chat/completions"
ASK = [{"role": "user", "content": "Paint it."}]
SCHEMA = {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip
PAINT = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
BODY: dict[str, Any] = {"messages": ASK, "max_tokens": 24, "seed": 1}
CALLED = {**BODY, "tools": [PAINT], "tool_choice": {"type": "tool", "name": "paint"}, "max_tokens": 60}
RESULTS = [
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Red?", "signature": "x"}, {"type": "text", "text": "I paint."},
        {"type": "tool_use", "id": "a", "name": "paint", "input": {"colour": "red"}},
    ]},
    {"role": "user", "content": [
        {"type": "text", "text": "Well?"},
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "done"}], "is_error": False},
    ]},
]  # fmt: skip
ASKED = [
    BODY,
    CALLED,
    {**BODY, "system": "Be brief.", "stop_sequences": [" "], "metadata": {"user_id": "me"}, "temperature": 0},
    {**BODY, "messages": [*ASK, *RESULTS], "tools": [PAINT], "thinking": {"type": "disabled"}},
    {**BODY, "messages": [*ASK, {"role": "assistant", "content": "Red, "}], "top_k": 5},
    {**BODY, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
]


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that its events make, as Anthropic describes them."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                kind = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "json")
                block[kind] += delta["partial_json" if kind == "json" else kind]
            case "content_block_stop":
                block = message["content"][event["index"]]
                block |= {"input": json.loads(text)} if (text := block.pop("json")) else {}
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case kind:
                assert kind == "message_stop"
    return message


@pytest.mark.parametrize("body", ASKED)
def test_a_stream_adds_up_to_the_answer(demo: Running, body: dict[str, Any]) -> None:
    whole = demo.answer(PATH, body)
    events = demo.events(PATH, body)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    streamed = put_together(events)
    for its in (whole, streamed):
        del its["id"], its["usage"]["speculation"]
        its["usage"]["input_tokens"] += its["usage"].pop("cache_read_input_tokens")
    assert streamed == whole
    counted = {name: body[name] for name in ("messages", "system", "tools", "thinking", "tool_choice") if name in body}
    assert demo.answer(f"{PATH}/count_tokens", counted) == {"input_tokens": whole["usage"]["input_tokens"]}
    demo.at_rest()


def test_it_is_the_chats_answer(demo: Running) -> None:
    """The same prompt and the same tokens as the chat that says the same."""
    tool = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
    chats: list[dict[str, Any]] = [
        {"messages": ASK},
        {"messages": ASK, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "paint"}}},
        {"messages": [{"role": "system", "content": "Be brief."}, *ASK], "stop": [" "], "temperature": 0},
        {"messages": [
            *ASK, {"role": "assistant", "content": "I paint.", "reasoning_content": "Red?", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "done"}, {"role": "user", "content": "Well?"},
        ], "tools": [tool]},
        {"messages": ASKED[4]["messages"], "continue_final_message": True, "top_k": 5},
        {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ]  # fmt: skip
    for body, chat in zip(ASKED, chats, strict=True):
        answer = demo.answer(CHAT, {**chat, "max_tokens": body["max_tokens"], "seed": 1})
        choice, mine = answer["choices"][0], demo.answer(PATH, body)
        used = mine["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == answer["usage"]["prompt_tokens"]
        assert used["output_tokens"] == answer["usage"]["completion_tokens"]
        for block in mine["content"]:
            if block["type"] == "text":
                assert block["text"] == choice["message"]["content"]
            else:
                function = choice["message"]["tool_calls"][0]["function"]
                assert (block["name"], block["input"]) == (function["name"], json.loads(function["arguments"]))
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice["finish_reason"]]
        sequence = " " if choice["stop_reason"] == " " else None
        assert (mine["stop_reason"], mine["stop_sequence"]) == ("stop_sequence" if sequence else reason, sequence)


@pytest.mark.parametrize(
    "more",
    [
        {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"}, "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "user_1_account__session_2"},
        },
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ],
)  # fmt: skip
def test_what_claude_code_asks_beside_changes_nothing(demo: Running, more: dict[str, Any]) -> None:
    assert demo.answer(PATH, {**BODY, **more})["content"] == demo.answer(PATH, BODY)["content"]


@pytest.mark.parametrize(
    ("more", "status", "kind", "named"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": RESULTS[1:]}, 400, "invalid_request_error", "messages.0"),
        ({"messages": [{**RESULTS[0], "role": "user"}]}, 400, "invalid_request_error", "content.0 is a thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "content.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools.0"),
        ({"tools": [{**PAINT, "name": "a b"}]}, 400, "invalid_request_error", "tools.0.name"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"thinking": {"type": "on"}}, 400, "invalid_request_error", "thinking.type"),
        ({"context_management": "all"}, 400, "invalid_request_error", "context_management"),
        ({"mcp_servers": []}, 400, "invalid_request_error", "mcp_servers"),
        ({"stop_sequences": ["x"] * 65}, 400, "invalid_request_error", "stop_sequences"),
    ],
)
def test_errors_are_anthropics(demo: Running, more: dict[str, Any], status: int, kind: str, named: str) -> None:
    found = demo.answer(PATH, {**BODY, **more}, status)
    assert set(found) == {"type", "error"}
    assert (found["type"], found["error"]["type"]) == ("error", kind)
    assert named in found["error"]["message"]


def test_a_fault_in_mid_stream_is_the_last_event(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any, pieces: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("outpace.server.api.anthropic.MessageEncoder.part", faulty)
    events = demo.events(PATH, BODY)
    assert [event["type"] for event in events] == ["message_start", "error"]
    assert events[1]["error"]["type"] == "api_error"
    monkeypatch.undo()
    demo.at_rest()


def test_their_keys_are_keys() -> None:
    with serving(Engine.load("demo", drafter="none", max_length=128), api_keys=("secret-key",)) as guarded:
        body = {**BODY, "max_tokens": 1}
        assert guarded.post(PATH, body, **{"x-api-key": "secret-key"}).status_code == 200
        assert guarded.post(PATH, body, authorization="Bearer secret-key").status_code == 200
        refused = guarded.post(PATH, body, **{"x-api-key": "another-key"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


SCRIPT = """
import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {"model": "demo", "max_tokens": 60, "extra_body": {"seed": 1, "return_progress": True}, "messages": ASK}
tools = [{"name": "paint", "input_schema": SCHEMA}]
called = client.messages.create(**asked, tools=tools, tool_choice={"type": "any"})
found = [called.stop_reason, called.content[0].name, called.content[0].input]
with client.messages.stream(**asked, tools=tools, tool_choice={"type": "any"}) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_message()
found += [kinds[0], kinds[-1], final.content[0].input, final.usage.output_tokens == called.usage.output_tokens]
result = {"type": "tool_result", "tool_use_id": final.content[0].id, "content": "done"}
talk = [*asked["messages"], final.to_param(), {"role": "user", "content": [result]}]
asked |= {"messages": talk, "tools": tools, "tool_choice": {"type": "none"}, "max_tokens": 8}
answer = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    found.append("".join(stream.text_stream) == answer.content[0].text)
counted = client.messages.count_tokens(model="demo", messages=talk, tools=tools, tool_choice={"type": "none"})
found.append(counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens)
adapter = TypeAdapter(RawMessageStreamEvent)
for event in client.messages.create(**asked, stream=True):
    adapter.validate_json(event.to_json(), strict=True)
TypeAdapter(Message).validate_json(answer.to_json(), strict=True)
try:
    client.messages.create(**{**asked, "model": "claude"})
except anthropic.NotFoundError as error:
    found.append(error.body["error"]["type"])
"""


def test_their_package_reads_it(demo: Running, tmp_path: Path) -> None:
    reason, name, given, first, last, streamed, *same, error = results_of(
        "agents", "anthropic", SCRIPT, demo.url, tmp_path, ASK=ASK, SCHEMA=SCHEMA
    )
    assert (reason, name, first, last) == ("tool_use", "paint", "message_start", "message_stop")
    assert given == streamed
    assert given["colour"] in ("red", "blue")
    assert same == [True, True, True]
    assert error == "not_found_error"
    demo.at_rest()
