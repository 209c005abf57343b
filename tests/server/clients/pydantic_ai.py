import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """The weather."""
    return RESULT[city]


async def asked(kind):
    model = kind("demo", provider=OpenAIProvider(base_url=BASE, api_key="none"))
    found = {"chat": (await Agent(model).run(CHAT)).output}
    async with Agent(model).run_stream(CHAT) as stream:
        found["stream"] = "".join([text async for text in stream.stream_text(delta=True)])
    found["tool"] = (await Agent(model, tools=[weather]).run(TOOL)).output
    found["structured"] = (await Agent(model, output_type=NativeOutput(Person)).run(STRUCTURED)).output.model_dump()
    by_tool = (await Agent(model, output_type=Person).run(STRUCTURED)).output.model_dump()
    assert by_tool == found["structured"]
    return found


async def both():
    one, other = [await asked(kind) for kind in (OpenAIChatModel, OpenAIResponsesModel)]
    assert one == other
    return one


found = asyncio.run(both())
