import json

import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
completions = client.chat.completions


def user(text):
    return [{"role": "user", "content": text}]


found = {"chat": completions.create(model="demo", messages=user(CHAT)).choices[0].message.content}
parts = completions.create(model="demo", messages=user(CHAT), stream=True)
found["stream"] = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": city}}]
called = completions.create(model="demo", messages=user(TOOL), tools=tools).choices[0].message
(call,) = called.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": RESULT[json.loads(call.function.arguments)["city"]]}
found["tool"] = completions.create(model="demo", messages=[*user(TOOL), called, result], tools=tools)
found["tool"] = found["tool"].choices[0].message.content
parsed = completions.parse(model="demo", messages=user(STRUCTURED), response_format=Person)
found["structured"] = parsed.choices[0].message.parsed.model_dump()
