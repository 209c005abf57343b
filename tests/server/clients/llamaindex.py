from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """The weather."""
    return RESULT[city]


llm = OpenAILike(
    model="demo", api_base=BASE, api_key="none", is_chat_model=True, is_function_calling_model=True,
    should_use_structured_outputs=True, max_retries=0, context_window=8000,
)  # fmt: skip
question = ChatMessage(role="user", content=CHAT)
found = {"chat": llm.chat([question]).message.content}
found["stream"] = "".join(part.delta or "" for part in llm.stream_chat([question]))
weather_tool = FunctionTool.from_defaults(weather)
asked = [ChatMessage(role="user", content=TOOL)]
called = llm.chat_with_tools([weather_tool], chat_history=asked)
(call,) = llm.get_tool_calls_from_response(called)
result = ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id})
again = llm.chat_with_tools([weather_tool], chat_history=[*asked, called.message, result])
found["tool"] = again.message.content
found["structured"] = llm.structured_predict(Person, PromptTemplate(STRUCTURED)).model_dump()
