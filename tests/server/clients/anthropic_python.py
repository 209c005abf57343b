import anthropic

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


def asked(*messages, **more):
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": each} for i, each in enumerate(messages)]
    return {"model": "demo", "max_tokens": 200, "messages": messages, **more}


found = {"chat": client.messages.create(**asked(CHAT)).content[0].text}
with client.messages.stream(**asked(CHAT)) as stream:
    found["stream"] = "".join(stream.text_stream)
city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "input_schema": city}]
called = client.messages.create(**asked(TOOL, tools=tools)).content
(call,) = (block for block in called if block.type == "tool_use")
result = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT[call.input["city"]]}]
found["tool"] = client.messages.create(**asked(TOOL, called, result, tools=tools)).content[0].text
kind = {"format": {"type": "json_schema", "schema": PERSON}}
found["structured"] = json.loads(client.messages.create(**asked(STRUCTURED, output_config=kind)).content[0].text)
