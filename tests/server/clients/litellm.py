import gc

import litellm

# Every provider of its that can be sent to a server of one's own.
PROVIDERS = {
    "openai/demo": BASE, "hosted_vllm/demo": BASE, "custom_openai/demo": BASE, "llamafile/demo": BASE,
    "lm_studio/demo": BASE,
    "anthropic/demo": URL, "ollama/demo": URL, "ollama_chat/demo": URL,
}  # fmt: skip

SHARED = {"api_key": "none", "max_tokens": 200, "timeout": 60}


def asked(model, *messages, **more):
    return litellm.completion(model, [*messages], **SHARED, api_base=PROVIDERS[model], **more)


def user(text):
    return {"role": "user", "content": text}


def streamed(model):
    text = "".join(part.choices[0].delta.content or "" for part in asked(model, user(CHAT), stream=True))
    gc.collect()  # of streams it leaves open: within httpcore, it may wait for itself (encode/httpcore#996)
    return text


def tool(model):
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "description": "It.", "parameters": city}}]
    called = asked(model, user(TOOL), tools=tools).choices[0].message
    (call,) = called.tool_calls
    result = RESULT[json.loads(call.function.arguments)["city"]]
    results = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": result}
    return asked(model, user(TOOL), called.model_dump(exclude_none=True), results, tools=tools)


def structured(model):
    kind = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    return json.loads(asked(model, user(STRUCTURED), response_format=kind).choices[0].message.content)


found, raw = {}, ("ollama/demo",)  # which writes the conversation out itself
for model in PROVIDERS:
    said = {"chat": asked(model, user(CHAT)).choices[0].message.content, "stream": streamed(model)}
    if model not in raw:
        said |= {"tool": tool(model).choices[0].message.content, "structured": structured(model)}
    assert said == {what: found.setdefault(what, answer) for what, answer in said.items()}, (model, said)
