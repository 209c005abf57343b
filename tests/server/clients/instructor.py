import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


class Weather(BaseModel):
    """The weather."""

    city: str


def asked(*messages):
    first, *more = messages
    return {"model": "demo", "messages": [{"role": "user", "content": first}, *more], "max_retries": 1}


def tool(client):
    """The call comes as an object; its result goes back with the message that it came in."""
    wanted, completion = client.chat.completions.create_with_completion(response_model=Weather, **asked(TOOL))
    called = completion.choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": RESULT[wanted.city]}
    more = called.model_dump(include={"role", "content", "tool_calls"}), result
    return client.chat.completions.create(response_model=None, **asked(TOOL, *more)).choices[0].message.content


found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0), mode=mode)
    answer = client.chat.completions.create(response_model=Person, **asked(STRUCTURED)).model_dump()
    assert answer == found.setdefault("structured", answer), mode
    (*_, last) = client.chat.completions.create_partial(response_model=Person, **asked(STRUCTURED))
    assert last.model_dump() == found.setdefault("stream", answer), mode
    if mode is instructor.Mode.TOOLS:
        found["tool"] = tool(client)
found["chat"] = client.chat.completions.create(response_model=None, **asked(CHAT)).choices[0].message.content
