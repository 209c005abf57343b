import asyncio

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """The weather."""
    return RESULT[city]


async def asked(kind):
    model = kind(model="demo", openai_client=AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0))
    plain = Agent(name="a", instructions="Be brief.", model=model)
    found = {"chat": (await Runner.run(plain, CHAT)).final_output, "stream": ""}
    async for event in Runner.run_streamed(plain, CHAT).stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            found["stream"] += event.data.delta
    found["tool"] = (await Runner.run(plain.clone(tools=[weather]), TOOL)).final_output
    found["structured"] = (await Runner.run(plain.clone(output_type=Person), STRUCTURED)).final_output.model_dump()
    return found


async def both():
    one, other = [await asked(kind) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)]
    assert one == other
    return one


found = asyncio.run(both())
