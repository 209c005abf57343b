"""Agents that people use, unmodified from their packages: their calls are made and their streams end. The demo's model
is tiny, so a call is forced where one is wanted, and nothing that it writes is run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.foreign import Client, results_of
from tests.server.scripted import scripted
from tests.server.serving import Running, serving
from tests.server.table import recorded

MINI_SWE_AGENT = """
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
ran = []
class Nothing(LocalEnvironment):
    def execute(self, action, *more, **options):
        ran.append(action["command"])
        return {"output": "done", "returncode": 0, "exception_info": ""}
asked = {"api_base": BASE, "api_key": "none", "temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
model = LitellmModel(model_name="openai/demo", model_kwargs=asked, cost_tracking="ignore_errors")
agent = DefaultAgent(model, Nothing(), system_template="Be brief.", instance_template="{{task}}", step_limit=2)
status = agent.run("List all files.")["exit_status"]
found = [status, len(ran), [message["role"] for message in agent.messages]]
"""
AIDER = r"""
import subprocess, sys
from pathlib import Path
def git(*words):
    named = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
    return subprocess.run(named, capture_output=True, text=True, check=True).stdout
file = Path("calc.py")
file.write_text("def add(a, b):\n    return a - b\n")
git("init", "-q"), git("add", "calc.py"), git("commit", "-qm", "first")
options = "yes-always no-check-update analytics-disable no-show-model-warnings no-gitignore no-pretty".split()
command = [sys.executable, "-m", "aider", "--model", "openai/demo", "--openai-api-base", BASE]
command += ["--openai-api-key", "none", *(f"--{name}" for name in options), "--message", "It adds.", "calc.py"]
subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
found = [file.read_text(), git("log", "--format=%s").splitlines(), git("diff", "HEAD", "calc.py")]
"""


def test_a_coding_agent(demo: Running, tmp_path: Path) -> None:
    """mini-swe-agent, over LiteLLM: it gets commands, and sends their results back."""
    status, ran, roles = results_of("clients", "mini-swe-agent", MINI_SWE_AGENT, demo.url, tmp_path)
    assert (status, ran) == ("LimitsExceeded", 2)
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "exit"]
    recorded(Client("mini-swe-agent", "clients", "mini-swe-agent"), ["tool"])
    demo.at_rest()


def test_aider_edits_a_file(tmp_path: Path) -> None:
    """In its default form: it sends the file, makes of the answer an edit, and commits it under a name that it asks
    for."""
    client = Client("aider", "aider", "aider-chat")
    assert client.version
    right = "def add(a, b):\n    return a + b\n"

    def script(prompt: str) -> str:
        return "Adds" if "commit message" in prompt else f"calc.py\n```\n{right}```\n"

    with serving(scripted(script)) as running:
        text, commits, left = results_of("aider", "aider-chat", AIDER, running.url, tmp_path)
        running.at_rest()
    assert text == right
    assert (commits, left) == (["Adds", "first"], "")
    recorded(client, ["whole task"])


# What Open WebUI's backend sends, by the source of open-webui 0.12.4: routers/openai.py, ollama.py and tasks.py,
# utils/headers.py, payload.py, middleware.py and misc.py, retrieval/utils.py. The first are a connection's to OpenAI's
# API, the others one's to Ollama's; every call has these headers, GET too.
HEADERS = {
    "content-type": "application/json", "authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Email": "a@example.org", "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "2",
}  # fmt: skip
TASK = [{"role": "user", "content": "### Task:\nGenerate a concise title.\n### Chat History:\nHi"}]
TALK = [{"role": "system", "content": "You help."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TOOL = {"type": "function", "function": {"name": "search", "description": "", "parameters": {
    "type": "object", "properties": {"query": {"type": "string", "description": "What."}}, "required": ["query"],
}}}  # fmt: skip
FUNCTION = {"name": "search", "arguments": '{"query": "x"}'}
CALLED = [
    *TALK, {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "a", "content": "Found."},
]  # fmt: skip
BEGUN = [*TALK, {"role": "assistant", "content": "Well,", "reasoning_content": "Hm."}]
SHORT_TALK = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi"}]
PARAMS = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0.1, "seed": 3}
OPTIONS = {
    **PARAMS, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "num_ctx": 2048, "num_batch": 512,
    "num_keep": 24, "num_predict": 24, "repeat_last_n": 64, "top_k": 40, "repeat_penalty": 1.1, "stop": ["###"],
    "num_gpu": 0, "use_mmap": True, "use_mlock": False, "num_thread": 2,
}  # fmt: skip
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OPEN_WEBUI: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/models", None),
    (CHAT, {"stream": True, "model": "demo", "messages": TALK}),
    (CHAT, {
        "stream": True, "model": "demo", "messages": TALK, "stream_options": {"include_usage": True}, "tools": [TOOL],
        **PARAMS, "max_tokens": 24, "stop": ["###"], "logit_bias": {"5": 1}, "response_format": {"type": "text"},
    }),
    (CHAT, {"model": "demo", "stream": True, "tools": [TOOL], "messages": CALLED}),
    (CHAT, {"model": "demo", "stream": True, "messages": BEGUN}),
    (CHAT, {  # "Continue", where the connection is said to be llama.cpp
        "model": "demo", "stream": True, "messages": BEGUN, "continue_final_message": True,
        "add_generation_prompt": False,
    }),
    (CHAT, {"model": "demo", "messages": TASK, "stream": False, "max_tokens": 1000}),
    (CHAT, {"model": "demo", "messages": SHORT_TALK, "stream": False}),  # tools by prompt
    (RESPONSES, {
        "model": "demo", "stream": True, "instructions": "You help.", "max_output_tokens": 24, "temperature": 0.7,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well,"}]},
            {"type": "function_call", "call_id": "a", **FUNCTION},
            {"type": "function_call_output", "call_id": "a", "output": "Found."},
        ],
        "tools": [{"type": "function", **TOOL["function"], "strict": False}],
    }),
    (RESPONSES, {"model": "demo", "stream": False, "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ]}),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}),
    ("/api/version", None),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/show", {"model": "demo", "name": "demo"}),
    ("/api/chat", {"model": "demo", "messages": SHORT_TALK, "stream": True}),
    ("/api/chat", {
        "model": "demo", "messages": SHORT_TALK, "stream": True, "options": OPTIONS, "tools": [TOOL],
        "keep_alive": "5m", "think": False,
    }),
    ("/api/chat", {"model": "demo", "stream": True, "tools": [TOOL], "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "thinking": "Hm.", "content": "", "tool_calls": [
            {"index": 0, "id": "a", "function": {"name": "search", "arguments": {"query": "x"}}},
        ]},
        {"role": "tool", "content": "Found.", "tool_call_id": "a"},
    ]}),
    ("/api/chat", {"model": "demo", "messages": TASK, "stream": False, "options": {"num_predict": 1000}}),
    ("/api/generate", {"model": "demo", "prompt": "Hi", "stream": True, "keep_alive": "5m", "images": []}),
    ("/api/generate", {"model": "demo", "keep_alive": 0, "prompt": ""}),  # unload it
]  # fmt: skip
READ = {
    CHAT: "choices", RESPONSES: "output", "/v1/messages/count_tokens": "input_tokens", "/api/show": "model_info",
    "/api/chat": "message", "/api/generate": "response",
}  # fmt: skip
BY_NAME = [  # of what is no text
    ("/v1/embeddings", {"input": ["x"], "model": "demo"}),
    ("/api/embed", {"input": ["x"], "model": "demo", "truncate": True}),
    ("/api/embeddings", {"prompt": "x", "model": "demo"}),
]


@pytest.mark.parametrize(("path", "body"), OPEN_WEBUI)
def test_open_webuis_calls(demo: Running, path: str, body: dict[str, Any] | None) -> None:
    """As its backend makes them, but that answers are short; what it reads of each is there."""
    if body is None:
        answer = demo.http.get(path, headers=HEADERS)
        assert answer.status_code == 200
        its = answer.json()
        if path == "/api/version":
            assert all(part.isdigit() for part in its["version"].split("."))  # it compares numbers
        else:
            assert its["data"][0]["id"] == "demo" if "data" in its else its["models"][0]["model"] == "demo"
        return
    if path in (CHAT, RESPONSES):
        body = {**body, "deadline": 0.2}
    elif path in ("/api/chat", "/api/generate"):
        body = {**body, "options": {**body.get("options", {}), "num_predict": 24}}
    answer = demo.post(path, body, **HEADERS)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        assert answer.headers["content-type"] == "application/json"
        its = answer.json()
        assert READ[path] in its
        assert body.get("keep_alive") != 0 or its["done_reason"] == "load"  # the only model stays
    elif path.startswith("/v1"):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert '"error":{' not in answer.text
        assert re.search(r"data: \[DONE\]|event: response\.(completed|incomplete)", answer.text)
    else:
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert json.loads(answer.text.splitlines()[-1])["done"] is True
    demo.at_rest()


@pytest.mark.parametrize(("path", "body"), BY_NAME)
def test_open_webui_is_told_what_there_is_not(demo: Running, path: str, body: dict[str, Any]) -> None:
    answer = demo.post(path, body, **HEADERS)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "'demo' writes text" in (error if path.startswith("/api") else error["message"])
