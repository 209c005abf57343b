import ollama

client = ollama.Client(host=URL)


def weather(city: str) -> str:
    """The weather.

    Args:
        city: where
    """
    return RESULT[city]


def user(text):
    return {"role": "user", "content": text}


found = {"chat": client.chat("demo", [user(CHAT)]).message.content}
found["stream"] = "".join(part.message.content or "" for part in client.chat("demo", [user(CHAT)], stream=True))
called = client.chat("demo", [user(TOOL)], tools=[weather]).message
(call,) = called.tool_calls
result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
found["tool"] = client.chat("demo", [user(TOOL), called, result], tools=[weather]).message.content
found["structured"] = json.loads(client.chat("demo", [user(STRUCTURED)], format=PERSON).message.content)
