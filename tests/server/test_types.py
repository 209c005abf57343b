"""Answers are what the openai package's types say, but for the fields that are ours (docs/serving.md)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.serving import Running

OURS = {
    "prompt_token_ids", "reasoning", "reasoning_content", "seed",
    "speculation", "stop_reason", "system_fingerprint", "token_ids",
    "max_model_len", "drafters", "metrics",
    "store", "bytes", "name",  # OpenAI's answers and events have them, too
}  # fmt: skip
TOOL = {"name": "paint", "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}}
MESSAGES = [{"role": "user", "content": "Count to ten."}]
CHATS: list[dict[str, Any]] = [
    {"n": 2, "logprobs": True, "top_logprobs": 2},
    {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "parallel_tool_calls": False},
    {"return_token_ids": True, "speculation": {"trace": True}},
]
TEXTS: list[dict[str, Any]] = [{"prompt": ["One, two,", "A, b,"], "logprobs": 2}, {"prompt": "One", "echo": True}]
RESPONSES: list[dict[str, Any]] = [
    {
        "instructions": "Be brief.",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "metadata": {"a": "b"},
    },
    {"tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "paint"}, "user": "me"},
    {"text": {"format": {"type": "json_schema", "name": "c", "schema": TOOL["parameters"]}}, "return_token_ids": True},
]


def more(value: Any) -> set[str]:
    """Names of all fields, however deep, that openai's types do not have."""
    if isinstance(value, BaseModel):
        found = set(value.model_extra or ())
        return found.union(*(more(getattr(value, name)) for name in type(value).model_fields))
    return set().union(*map(more, value)) if isinstance(value, list) else set()


adapter: Any = cache(TypeAdapter)  # one of all events takes a while to make


def check(kind: Any, value: Any) -> None:
    parsed = adapter(kind).validate_json(json.dumps(value), strict=True)
    assert more(parsed) <= OURS


@pytest.mark.parametrize("body", CHATS)
def test_chats(demo: Running, body: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 40, **body}
    check(ChatCompletion, demo.answer("/v1/chat/completions", body))
    for chunk in demo.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}):
        check(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("body", TEXTS)
def test_completions(demo: Running, body: dict[str, Any]) -> None:
    check(Completion, demo.answer("/v1/completions", body))
    for chunk in demo.events("/v1/completions", body):
        for choice in chunk["choices"]:
            choice["finish_reason"] = (
                choice["finish_reason"] or "stop"
            )  # OpenAI's own streams say null, its type does not
        check(Completion, chunk)


@pytest.mark.parametrize("body", RESPONSES)
def test_responses(demo: Running, body: dict[str, Any]) -> None:
    body = {"input": "Count to ten.", "max_output_tokens": 40, **body}
    check(Response, demo.answer("/v1/responses", body))
    for event in demo.events("/v1/responses", body):
        check(ResponseStreamEvent, event)


def test_models(demo: Running) -> None:
    for model in demo.http.get("/v1/models").json()["data"]:
        check(Model, model)
