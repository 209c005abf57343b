"""JSON schemas: what an answer may say. A text may be said where an answer can be resumed after its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from outpace import Engine
from tests.server.serving import Running, serving


class Person(BaseModel):
    name: str
    age: int | None = None


class Team(BaseModel):
    model_config = ConfigDict(extra="allow")
    lead: Person


PERSON = Person.model_json_schema()
MORE = '{"name": "Ada", "wage": 3'
NAMED = {"properties": {"a": {"type": "integer"}}}
OTHER = {"properties": {"b": {"type": "integer"}}}
EMPTY = {"type": "object", "properties": {}}
BASE = {"$defs": {"base": NAMED}, "type": "object"}


@pytest.fixture(scope="module")
def opened() -> Iterator[Running]:
    with serving(Engine.load("demo", drafter="none", max_length=512), open_schemas=True) as running:
        yield running


def may_say(server: Running, path: str, body: dict[str, Any], text: str) -> bool:
    tokens = server.answer("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    answer = server.post(
        path, {**body, "seed": 1, "max_tokens": len(tokens) + 1, "resume": {"token_ids": tokens}}
    ).json()
    assert "choices" in answer or answer["error"]["param"] == "resume", answer
    return "choices" in answer


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "x", "schema": schema}
    return {"prompt": "Who?", "response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (PERSON, '{"name": "Ada", "age": 3}', MORE),
        ({**PERSON, "additionalProperties": True}, MORE, "{}"),
        (Team.model_json_schema(), '{"lead": {"name": "Ada"}, "x": 1', '{"lead": {"name": "Ada", "wage'),
        ({"type": "object"}, '{"wage": 3', "[3"),
        (EMPTY, "{}", '{"a'),
        ({"type": "array", "items": {"anyOf": [NAMED, EMPTY]}}, '[{"a": 1}, {}', '[{"b'),
        ({"allOf": [NAMED]}, '{"a": 1', '{"b'),
        ({"allOf": [NAMED, OTHER], "type": "object"}, '{"a": 1, "b": 2', '{"a": "x'),
        ({**BASE, "allOf": [{"$ref": "#/$defs/base"}, OTHER]}, '{"a": 1, "b": 2', '{"b": "x'),
        ({**BASE, "properties": {"inner": {"$ref": "#/$defs/base"}}}, '{"inner": {"a": 1}}', '{"inner": {"b'),
        ({**EMPTY, "properties": {"properties": {"type": "integer"}}}, '{"properties": 1}', '{"b'),
    ],
)
def test_objects_have_the_properties_that_their_schema_names(
    demo: Running, schema: dict[str, Any], allowed: str, refused: str
) -> None:
    assert may_say(demo, "/v1/completions", of_schema(schema), allowed)
    assert not may_say(demo, "/v1/completions", of_schema(schema), refused)


def test_an_option_opens_them(opened: Running, demo: Running) -> None:
    tool = {"type": "function", "function": {"name": "hire", "strict": True, "parameters": PERSON}}
    chat = {"messages": [{"role": "user", "content": "Who?"}], "tools": [tool], "tool_choice": "required"}
    called = f'<tool_call>[{{"name": "hire", "arguments": {MORE}'
    for server, expected in ((opened, True), (demo, False)):
        assert may_say(server, "/v1/completions", of_schema(PERSON), MORE) is expected
        assert may_say(server, "/v1/completions", {"prompt": "Who?", "guided_json": json.dumps(PERSON)}, MORE) is (
            expected
        )
        assert may_say(server, "/v1/chat/completions", chat, called) is expected


def test_answers_invent_no_keys(demo: Running) -> None:
    """As pydantic's users ask, and Ollama's."""
    for seed in range(6):
        asked = {"messages": [{"role": "user", "content": "Who was the first programmer? Answer in JSON."}]}
        asked |= {"model": "demo", "format": PERSON, "options": {"seed": seed, "num_predict": 200}, "stream": False}
        answer = demo.answer("/api/chat", asked)
        if answer["done_reason"] == "stop":
            assert json.loads(answer["message"]["content"]).keys() <= {"name", "age"}
