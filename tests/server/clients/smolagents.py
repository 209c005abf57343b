from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: where
    """
    return RESULT[city]


model = OpenAIServerModel(model_id="demo", api_base=BASE, api_key="none")


def user(text):
    return [{"role": "user", "content": text}]


found = {"chat": model.generate(user(CHAT)).content}
found["stream"] = "".join(part.content or "" for part in model.generate_stream(user(CHAT)))
found["tool"] = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0).run(TOOL)
kind = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
found["structured"] = json.loads(model.generate(user(STRUCTURED), response_format=kind).content)
