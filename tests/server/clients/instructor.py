import instructor
import openai
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def asked(text):
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_retries": 1}


found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0), mode=mode)
    answer = client.chat.completions.create(response_model=Person, **asked(STRUCTURED)).model_dump()
    assert answer == found.setdefault("structured", answer), mode
    (*_, last) = client.chat.completions.create_partial(response_model=Person, **asked(STRUCTURED))
    assert last.model_dump() == found.setdefault("stream", answer), mode
found["chat"] = client.chat.completions.create(response_model=None, **asked(CHAT)).choices[0].message.content
