import openai
import outlines
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


model = outlines.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0), "demo")
found = {"chat": model(CHAT), "stream": "".join(model.stream(CHAT))}
found["structured"] = json.loads(model(STRUCTURED, Person))
