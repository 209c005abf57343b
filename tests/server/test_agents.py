"""Agents that people use, unmodified from their packages: their calls are made and their streams end. The demo's model
is tiny, so a call is forced where one is wanted, and nothing that it writes is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.foreign import told
from tests.server.serving import Running

COLOURS = {"red", "blue"}
OPENAI_AGENTS = """
import asyncio
from typing import Literal
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
client, said = AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0), []
@function_tool
def paint(colour: Literal["red", "blue"]) -> str:
    \"\"\"Paints.\"\"\"
    return colour
async def main():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="demo", openai_client=client)
        settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, extra_body={"seed": 1})
        painter = Agent(name="a", instructions="Be brief.", tools=[paint], model=model, model_settings=settings,
                        tool_use_behavior="stop_on_first_tool")
        result = await Runner.run(painter, "Paint it.")
        streamed = Runner.run_streamed(painter, "Paint it.")
        kinds = {event.type async for event in streamed.stream_events()}
        settings = ModelSettings(tool_choice="none", extra_body={"grammar": {"type": "regex", "value": "well"}})
        talk = [*result.to_input_list(), {"role": "user", "content": "Well?"}]
        again = await Runner.run(Agent(name="b", tools=[paint], model=model, model_settings=settings), talk)
        said.append([result.final_output, streamed.final_output, "raw_response_event" in kinds, again.final_output])
asyncio.run(main())
"""
PYDANTIC_AI = """
import asyncio
from typing import Literal
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
class Painted(BaseModel):
    colour: Literal["red", "blue"]
said = []
async def main():
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("demo", provider=OpenAIProvider(base_url=BASE, api_key="none"))
        painter = Agent(model, output_type=Painted, model_settings={"max_tokens": 80, "extra_body": {"seed": 1}})
        colour = (await painter.run("Paint it.")).output.colour
        plain = Agent(model, model_settings={"extra_body": {"grammar": {"type": "regex", "value": "well"}}})
        result = await plain.run("Well?")
        again = await plain.run("And?", message_history=result.all_messages())
        async with plain.run_stream("Well?") as stream:
            texts = [text async for text in stream.stream_text()]
        said.append([colour, texts[-1], result.output == again.output, again.output])
asyncio.run(main())
"""
SMOLAGENTS = """
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
@tool
def paint(colour: str) -> str:
    \"\"\"Paints.

    Args:
        colour: which
    \"\"\"
    return "painted"
model = OpenAIServerModel(model_id="demo", api_base=BASE, api_key="none", max_tokens=80, extra_body={"seed": 1})
said = []
for stream in (False, True):
    agent = ToolCallingAgent(tools=[paint], model=model, max_steps=1, verbosity_level=0, stream_outputs=stream)
    agent.run("Paint it.")
    said.append([agent.memory.steps[1].tool_calls[0].name, agent.memory.steps[1].observations])
"""
MINI_SWE_AGENT = """
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
ran = []
class Nothing(LocalEnvironment):
    def execute(self, action, *more, **options):
        ran.append(action["command"])
        return {"output": "done", "returncode": 0, "exception_info": ""}
asked = {"api_base": BASE, "api_key": "none", "temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
model = LitellmModel(model_name="openai/demo", model_kwargs=asked, cost_tracking="ignore_errors")
agent = DefaultAgent(model, Nothing(), system_template="Be brief.", instance_template="{{task}}", step_limit=2)
status = agent.run("List all files.")["exit_status"]
said = [status, len(ran), [message["role"] for message in agent.messages]]
"""


@pytest.mark.parametrize(
    ("package", "script"),
    [("agents", OPENAI_AGENTS), ("pydantic_ai", PYDANTIC_AI)],
    ids=["openai-agents", "pydantic-ai"],
)
def test_agents_over_chats_and_responses(demo: Running, tmp_path: Path, package: str, script: str) -> None:
    for first, second, read, again in told("agents", package, script, demo.url, tmp_path):
        assert {first, second} <= COLOURS | {"well"}
        assert first in COLOURS
        assert (read, again) == (True, "well")
    demo.at_rest()


def test_smolagents(demo: Running, tmp_path: Path) -> None:
    assert told("agents", "smolagents", SMOLAGENTS, demo.url, tmp_path) == [["paint", "painted"]] * 2
    demo.at_rest()


def test_a_coding_agent(demo: Running, tmp_path: Path) -> None:
    """mini-swe-agent, over LiteLLM: it gets commands, and sends their results back."""
    status, ran, roles = told("clients", "minisweagent", MINI_SWE_AGENT, demo.url, tmp_path)
    assert (status, ran) == ("LimitsExceeded", 2)
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "exit"]
    demo.at_rest()


TASK = [{"role": "user", "content": "### Task:\nGenerate a concise title.\n### Chat History:\nHi"}]
TALK = [{"role": "system", "content": "You help."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TOOL = {"type": "function", "function": {"name": "search", "description": "", "parameters": {
    "type": "object", "properties": {"query": {"type": "string", "description": "What."}}, "required": ["query"],
}}}  # fmt: skip
OPEN_WEBUI: list[tuple[str, dict[str, Any] | None]] = [  # what its backend sends a server, as its source has it
    ("/v1/models", None),
    ("/api/version", None),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/v1/chat/completions", {"stream": True, "model": "demo", "messages": TALK}),
    ("/v1/chat/completions", {
        "stream": True, "model": "demo", "messages": TALK, "stream_options": {"include_usage": True}, "tools": [TOOL],
        "temperature": 0.7, "top_p": 0.9, "max_tokens": 24, "seed": 3, "stop": ["###"], "frequency_penalty": 0.1,
        "presence_penalty": 0.1, "logit_bias": {"5": 1},
    }),
    ("/v1/chat/completions", {"model": "demo", "messages": TASK, "stream": False, "max_completion_tokens": 1000}),
    ("/api/chat", {"model": "demo", "messages": [
        {"role": "system", "content": "You help."}, {"role": "user", "content": "Hi"},
    ], "options": {"temperature": 0.7, "num_ctx": 2048, "num_predict": 24, "repeat_penalty": 1.1}, "stream": True}),
    ("/api/chat", {
        "model": "demo", "messages": TASK, "stream": False, "options": {"num_predict": 1000}, "tools": [TOOL],
    }),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "stream": True, "keep_alive": "5m", "images": []}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), OPEN_WEBUI)
def test_open_webuis_calls(demo: Running, path: str, body: dict[str, Any] | None) -> None:
    if body is None:
        assert demo.http.get(path).status_code == 200
        return
    if path.startswith("/v1"):
        body, streamed = {**body, "deadline": 0.2}, "text/event-stream; charset=utf-8"
    else:
        body, streamed = {**body, "options": {**body.get("options", {}), "num_predict": 24}}, "application/x-ndjson"
    answer = demo.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == (streamed if body["stream"] else "application/json")
