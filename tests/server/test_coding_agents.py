"""Claude Code, Codex, OpenCode, Qwen Code and Cline, unmodified from their packages: they read a file, edit it and end.

A model that calls tools well is too large for a test, so a script says what it would; all else is real.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outpace.server.engines.generation import Observer
from outpace.server.errors import APIError
from tests.server.foreign import PROGRAMS, Client
from tests.server.scripted import scripted
from tests.server.serving import serving
from tests.server.table import recorded

TASK, END = "Read note.txt and make the sky blue.", "The sky is blue now."


@dataclass
class Agent:
    """How a program is started; ``calls``: of tools, that the model makes: it reads, then edits."""

    options: list[str]
    calls: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # of its home


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>[{json.dumps({'name': name, 'arguments': arguments})}]</tool_call>"


def claude(url: str, note: str) -> Agent:
    return Agent(
        ["-p", TASK, "--permission-mode", "acceptEdits"],
        [call("Read", file_path=note), call("Edit", file_path=note, old_string="red", new_string="blue")],
        {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    )


def codex(url: str, note: str) -> Agent:
    provider = f'model_providers.o={{name="o", base_url="{url}/v1"}}'
    options = ["exec", "-m", "demo", "-c", "model_provider=o", "-c", provider]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    commands = (f"cat {note}", f"sed -i s/red/blue/ {note}")
    return Agent(options, [call("exec_command", cmd=command) for command in commands])


def opencode(url: str, note: str) -> Agent:
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    config = {"provider": {"outpace": {**provider, "models": {"demo": {}}}}}
    return Agent(
        ["run", "-m", "outpace/demo", TASK],
        [call("read", filePath=note), call("edit", filePath=note, oldString="red", newString="blue")],
        {"OPENCODE_CONFIG_CONTENT": json.dumps(config)},
    )


def cline(url: str, note: str) -> Agent:
    settings = {"provider": "openai-compatible", "apiKey": "none", "model": "demo", "baseUrl": f"{url}/v1"}
    own = {"settings": settings, "updatedAt": "2026-11-28T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": own}}
    return Agent(
        [TASK],
        [call("read_files", files=[{"path": note}]), call("editor", path=note, old_text="red", new_text="blue")],
        {"CLINE_SESSION_BACKEND_MODE": "local"},  # no daemon, which would outlive it
        {".cline/data/settings/providers.json": json.dumps(providers)},
    )


def qwen(url: str, note: str) -> Agent:
    return Agent(
        ["-p", TASK, "--yolo", "--auth-type", "openai"],
        [call("read_file", file_path=note), call("edit", file_path=note, old_string="red", new_string="blue")],
        {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "demo"},
    )


def test_the_docs_start_agents_as_these_tests_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    lines, url = page.split("```")[1], "http://127.0.0.1:8000"
    assert shlex.join(["codex", *codex(url, "").options[1:7]]) in lines
    for agent, names in (
        (claude(url, ""), ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN")),
        (qwen(url, ""), ("OPENAI_BASE_URL", "OPENAI_API_KEY")),
    ):
        assert " ".join(f"{name}={agent.environment[name]}" for name in names) in lines


class Refused(Observer):
    """What the server refused."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def refused(self, error: APIError) -> None:
        self.messages.append(error.message)


AGENTS = [
    (claude, Client("Claude Code", "npm", "@anthropic-ai/claude-code")),
    (codex, Client("Codex", "npm", "@openai/codex")),
    (opencode, Client("OpenCode", "npm", "opencode-ai")),
    (qwen, Client("Qwen Code", "npm", "@qwen-code/qwen-code")),
    (cline, Client("Cline", "npm", "cline")),
]


@pytest.mark.parametrize(("agent", "client"), AGENTS, ids=[agent.__name__ for agent, _ in AGENTS])
def test_a_coding_agent_reads_a_file_edits_it_and_ends(
    tmp_path: Path, agent: Callable[[str, str], Agent], client: Client
) -> None:
    assert client.version
    work = tmp_path / "work"
    work.mkdir()
    note = work / "note.txt"
    note.write_text("The sky is red.\n")
    prompts: list[str] = []
    calls = agent("", str(note)).calls
    last = json.loads(calls[-1].removeprefix("<tool_call>[").removesuffix("]</tool_call>"))["name"]

    def script(prompt: str) -> str:
        if f'"name": "{last}"' not in prompt:
            return "Note"  # a title for the conversation
        prompts.append(prompt)
        return [*calls, END][min(prompt.count("<tool_response>"), len(calls))]

    refused = Refused()
    with serving(scripted(script), observers=[refused], any_name=True) as running:
        started = agent(running.url, str(note))
        for name, text in started.files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        others = ("ANTHROPIC", "CLAUDE", "CLINE", "CODEX", "OPENAI", "OPENCODE", "QWEN", "XDG")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        environment |= {"HOME": str(tmp_path), "PWD": str(work), "DO_NOT_TRACK": "1", **started.environment}
        command = [PROGRAMS / agent.__name__, *started.options]
        done = subprocess.run(
            command, env=environment, cwd=work, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=240, check=False,
        )  # fmt: skip
        running.at_rest()
    assert (done.returncode, END in done.stdout) == (0, True), (done.stdout, done.stderr)
    assert note.read_text() == "The sky is blue.\n"
    assert [prompt.count("<tool_response>") for prompt in prompts] == [0, 1, 2]
    assert "The sky is red." in prompts[1].partition("<tool_response>")[2]
    assert refused.messages == []
    recorded(client, ["whole task"])
