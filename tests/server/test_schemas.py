"""JSON schemas: what an answer may say. A text may be said where an answer can be resumed after its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, WithJsonSchema

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


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    parts: list[Part] = []


# As pydantic writes decimals from 2.12 on.
Price = Annotated[
    Decimal,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}),
]


class Order(BaseModel):
    """What people's models hold: sets, decimals, dates, enums as keys, unions, recursion."""

    tags: set[Literal["a", "b"]]
    price: Price
    day: date
    stock: dict[Colour, int]
    owner: Person | int
    part: Part


# What msgspec 0.22 says of a struct: a list of a tagged union, a dict with a pattern of its keys, a date, bytes.
MSGSPEC: dict[str, Any] = {
    "$ref": "#/$defs/Drawing",
    "$defs": {
        "Drawing": {
            "title": "Drawing",
            "type": "object",
            "properties": {
                "shapes": {
                    "type": "array",
                    "items": {
                        "anyOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
                        "discriminator": {
                            "propertyName": "type",
                            "mapping": {"circle": "#/$defs/Circle", "square": "#/$defs/Square"},
                        },
                    },
                },
                "names": {
                    "type": "object",
                    "propertyNames": {"pattern": "^[a-z]+$"},
                    "additionalProperties": {"type": "integer"},
                },
                "day": {"type": "string", "format": "date"},
                "data": {"type": "string", "contentEncoding": "base64"},
            },
            "required": ["shapes", "names", "day", "data"],
        },
        "Circle": {
            "title": "Circle",
            "type": "object",
            "properties": {"type": {"enum": ["circle"]}, "radius": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["type", "radius"],
        },
        "Square": {
            "title": "Square",
            "type": "object",
            "properties": {"type": {"enum": ["square"]}, "side": {"type": "integer"}},
            "required": ["type", "side"],
        },
    },
}
# As zod 4's z.toJSONSchema writes z.file(), z.tuple(), z.union(), z.record() and z.never().
ZOD: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
        "kind": {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "format": "email"}]},
        "rest": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}},
        "never": {"not": {}},
    },
    "required": ["file", "pair", "kind", "rest"],
    "additionalProperties": False,
}
ORDER = (
    '{"tags": ["a"], "price": "1.50", "day": "2026-11-28", "stock": {"red": 1}, "owner": {"name": "A"}, '
    '"part": {"parts"'
)
DRAWING = '{"shapes": [{"type": "circle", "radius": 1.5}], "names": {"ab": 1}, "day": "2026-11-28", "data": "aGk="'


@pytest.mark.parametrize(
    ("schema", "allowed", "refused", "said"),
    [
        (Order.model_json_schema(), ORDER, ORDER.replace("red", "green"), ["uniqueItems", "look-around"]),
        (Order.model_json_schema(), ORDER, ORDER.replace("1.50", "x"), ["uniqueItems", "look-around"]),
        (Order.model_json_schema(), ORDER, ORDER.replace("11-28", "13-28"), ["uniqueItems", "look-around"]),
        (MSGSPEC, DRAWING, DRAWING.replace("circle", "cube"), []),
        (MSGSPEC, DRAWING, DRAWING.replace("ab", "A1"), []),
        (MSGSPEC, DRAWING, DRAWING.replace("aGk=", "aGk"), []),
        ({"type": ["string", "null"], "contentEncoding": "base64"}, '"aGk="', '"aGk"', []),
        (
            {"type": "string", "pattern": "^a+$", "contentEncoding": "base64", "contentMediaType": "image/png"},
            '"aaa"', '"b"', ["contentEncoding base64", "contentMediaType image/png"],
        ),
        ({"type": "string", "pattern": "^bc$"}, '"bc"', '"c"', []),
        ({"type": "string", "pattern": "^(?=b)bc$"}, '"bc"', '"c"', ["look-around"]),  # the same grammar
        ({"type": "string", "contentMediaType": "x" * 10_000}, '"a"', "a", ["contentMediaType xxx"]),
        (
            ZOD, '{"file": "x", "pair": ["a", 1], "kind": "k", "rest": {"x": true}', '{"file": "x", "pair": [1',
            ["format binary", "oneOf", "not"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_enforced_of_a_schema_is_said(
    demo: Running, schema: dict[str, Any], allowed: str, refused: str, said: list[str]
) -> None:
    body = of_schema(schema)
    assert may_say(demo, "/v1/completions", body, allowed)
    assert not may_say(demo, "/v1/completions", body, refused)
    notes = demo.answer("/v1/completions", {**body, "max_tokens": 1})["usage"]["speculation"]["notes"]
    note = next((note for note in notes if "JSON schema" in note), "")
    assert bool(note) == bool(said)
    assert all(word in note for word in said)
    assert len(note) <= 2000  # a client's own words may be in it


def test_what_is_not_enforced_of_tools_is_said(demo: Running) -> None:
    said = {"a": {"type": "string", "pattern": "^(?=b)bc$"}, "b": {"type": "array", "uniqueItems": True}}
    function = {"name": "f", "parameters": {"type": "object", "properties": said}}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}], "max_tokens": 1}
    for more, there in (
        ({"tool_choice": "required"}, True),
        ({}, False),
    ):  # where nothing binds calls, all is the model's
        (*_, note) = [*demo.answer("/v1/chat/completions", {**body, **more})["usage"]["speculation"]["notes"], ""][:1]
        assert [word in note for word in ("of the schemas", "look-around", "uniqueItems")] == [there] * 3


OUTSIDE = {"properties": {"a": {"$ref": "https://a.b/c.json"}}}
MESSAGES = [{"role": "user", "content": "Hi"}]
FORMAT = {"type": "json_schema", "schema": OUTSIDE}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": OUTSIDE},
        }}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": OUTSIDE}}
        ]}),
        ("/v1/completions", {"prompt": "Hi", "guided_json": OUTSIDE}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"name": "x", **FORMAT}}}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9, "output_config": {"format": FORMAT}}),
        ("/completion", {"prompt": "Hi", "json_schema": OUTSIDE}),
        ("/api/chat", {"model": "demo", "messages": MESSAGES, "format": OUTSIDE}),
    ],
)  # fmt: skip
def test_a_reference_to_another_document_is_refused_by_name(demo: Running, path: str, body: dict[str, Any]) -> None:
    answer = demo.post(path, body)
    assert answer.status_code == 400
    assert "https://a.b/c.json leads to another document" in answer.text
    assert "$defs" in answer.text
