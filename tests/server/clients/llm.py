import os
import pathlib

home = pathlib.Path(os.environ["LLM_USER_PATH"])
home.mkdir(exist_ok=True)
(home / "extra-openai-models.yaml").write_text(
    f'- model_id: outpace\n  model_name: demo\n  api_base: "{BASE}"\n  supports_tools: true\n  supports_schema: true\n'
)
import llm  # noqa: E402


def weather(city: str) -> str:
    """The weather."""
    return RESULT[city]


model = llm.get_model("outpace")
found = {"chat": model.prompt(CHAT, stream=False).text(), "stream": "".join(model.prompt(CHAT))}
found["tool"] = model.chain(TOOL, tools=[weather]).text()
found["structured"] = json.loads(model.prompt(STRUCTURED, schema=PERSON).text())
