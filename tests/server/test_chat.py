"""Chats through the openai client: what the server says is what the engine says."""

from __future__ import annotations

from typing import Any

import pytest

from outpace import Engine, SamplingParams
from tests.server.serving import Running

MESSAGES: list[Any] = [{"role": "user", "content": "Count to ten, twice."}]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> Any:
    return plain.generate(MESSAGES, SamplingParams(max_tokens=24, temperature=0.8, seed=7))


def test_an_answer_is_the_engines(demo: Running, expected: Any) -> None:
    answer = demo.client().chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=24, temperature=0.8, seed=7
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.completion_tokens
    assert answer.usage.prompt_tokens == expected.prompt_tokens


def test_a_stream_is_the_same_text(demo: Running, expected: Any) -> None:
    chunks = list(
        demo.client().chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=24, temperature=0.8, seed=7, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == expected.completion_tokens
    demo.at_rest()


def test_models_are_listed(demo: Running) -> None:
    assert [model.id for model in demo.client().models.list()] == ["demo"]
