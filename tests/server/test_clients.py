"""Others' clients, unmodified from their packages: they chat, stream, call a tool and send its result back, and ask for
a structured answer. What they did is the table of docs/serving.md.

A model that calls tools well is too large for a test, so a script says what it would; all else is real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.foreign import Client
from tests.server.scripted import scripted
from tests.server.serving import Running, serving
from tests.server.table import recorded, table

CHAT, TOOL, STRUCTURED = "Say hello.", "What is the weather in Paris?", "Who wrote the first program?"
HELLO, WARM, ADA = "Hello, world!", "It is warm in Paris.", {"name": "Ada", "age": 36}
RESULT = {"Paris": "21 degrees"}
PERSON = {
    "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
RIGHT = {"chat": [HELLO], "stream": [HELLO, ADA], "tool": [WARM], "structured": [ADA]}
CLIENTS = [
    Client("openai (Python)", "agents", "openai"),
    Client("openai (Node)", "npm", "openai"),
    Client("anthropic (Python)", "agents", "anthropic"),
    Client("anthropic (Node)", "npm", "@anthropic-ai/sdk"),
    Client("ollama (Python)", "agents", "ollama"),
    Client("ollama (Node)", "npm", "ollama"),
    Client("LangChain", "clients", "langchain-openai"),
    Client("LiteLLM", "clients", "litellm"),
    Client("Vercel AI", "npm", "ai"),
    Client("llm", "clients", "llm"),
    Client("DSPy", "clients", "dspy"),
    Client("Instructor", "clients", "instructor"),
    Client("LlamaIndex", "clients", "llama-index-llms-openai-like"),
    Client("Outlines", "clients", "outlines", without=("tool",)),
    Client("Pydantic AI", "agents", "pydantic-ai-slim"),
    Client("OpenAI Agents", "agents", "openai-agents"),
    Client("smolagents", "agents", "smolagents"),
]


def call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>[{json.dumps({'name': name, 'arguments': arguments})}]</tool_call>"


def script(prompt: str) -> str:
    if "next_tool_name" in prompt:  # DSPy's agents ask for calls as objects
        done = RESULT["Paris"] in prompt
        call_ = {"next_tool_name": "finish" if done else "weather", "next_tool_args": {} if done else {"city": "Paris"}}
        return json.dumps({"next_thought": "So.", **call_})
    if "observation_0" in prompt:
        return json.dumps({"reasoning": "So.", "answer": WARM})
    offered = re.search(r'"name": "(\w+)", "(?:description|parameters)"', prompt)
    if RESULT["Paris"] in prompt:
        return call("final_answer", {"answer": WARM}) if '"final_answer"' in prompt else WARM
    if TOOL in prompt:
        return call("weather" if offered is None else offered[1], {"city": "Paris"})
    if STRUCTURED in prompt:
        return json.dumps(ADA) if offered is None else call(offered[1], ADA)
    return HELLO


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(scripted(script)) as its:
        yield its


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_chats_streams_calls_and_asks_for_json(running: Running, tmp_path: Path, client: Client) -> None:
    known = {"CHAT": CHAT, "TOOL": TOOL, "STRUCTURED": STRUCTURED, "RESULT": RESULT, "PERSON": PERSON}
    assert client.version
    found = client.results(Path(__file__).parent / "clients", running.url, tmp_path, **known)
    assert {what: answer for what, answer in found.items() if answer not in RIGHT[what]} == {}
    assert found.keys().isdisjoint(client.without)
    assert found.keys() | {*client.without} == RIGHT.keys()
    recorded(client, [what for what in RIGHT if what in found])
    running.at_rest()


def test_the_table_has_the_pinned_versions() -> None:
    """Without any client, too."""
    pins = re.sub(r"\[.*?\]", "", (Path(__file__).parents[2] / "scripts" / "clients").read_text(encoding="utf-8"))
    for name, row in table().items():
        assert re.search(rf"[\s\"]{row['package']}(==|@){re.escape(row['version'])}[\s\"]", pins), name
