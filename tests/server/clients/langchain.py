from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather."""
    return RESULT[city]


llm = ChatOpenAI(model="demo", base_url=BASE, api_key="none", max_retries=0)
responses = ChatOpenAI(model="demo", base_url=BASE, api_key="none", max_retries=0, use_responses_api=True)
assert responses.invoke(CHAT).text == llm.invoke(CHAT).text
found = {"chat": llm.invoke(CHAT).content, "stream": "".join(part.content for part in llm.stream(CHAT))}
able = llm.bind_tools([weather])
called = able.invoke(TOOL)
(call,) = called.tool_calls
result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
found["tool"] = able.invoke([("human", TOOL), called, result]).content
found["structured"] = llm.with_structured_output(Person).invoke(STRUCTURED).model_dump()
assert (
    llm.with_structured_output(Person, method="function_calling").invoke(STRUCTURED).model_dump() == found["structured"]
)
