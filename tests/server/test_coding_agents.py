"""Claude Code and Codex, unmodified from their packages: they read a file, edit it and end, against the real server.

A model that calls tools well is too large for a test, so a script says what it would: everything else is real.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from outpace.server.engines.generation import Observer
from outpace.server.errors import APIError
from tests.server.foreign import skip
from tests.server.scripted import scripted
from tests.server.serving import serving

PROGRAMS = Path(__file__).parents[2] / ".venv" / "npm" / "node_modules" / ".bin"
TASK, END = "Read note.txt and make the sky blue.", "The sky is blue now."
CODEX = (
    'model_providers.outpace={{name="Outpace", base_url="{url}/v1"}}', "model_provider=outpace",
    "model=demo",
)  # fmt: skip


class Refused(Observer):
    """What the server refused."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def refused(self, error: APIError) -> None:
        self.messages.append(error.message)


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>[{json.dumps({'name': name, 'arguments': arguments})}]</tool_call>"


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_a_coding_agent_reads_a_file_edits_it_and_ends(tmp_path: Path, agent: str) -> None:
    if not (PROGRAMS / agent).exists():
        skip(agent, "clients")
    work = tmp_path / "work"
    work.mkdir()
    note = work / "note.txt"
    note.write_text("The sky is red.\n")
    if agent == "claude":
        tool = "Edit"
        calls = [call("Read", file_path=str(note))]
        calls.append(call("Edit", file_path=str(note), old_string="red", new_string="blue"))
    else:
        tool = "exec_command"
        calls = [call(tool, cmd=f"cat {note}"), call(tool, cmd=f"sed -i s/red/blue/ {note}")]
    prompts: list[str] = []

    def script(prompt: str) -> str:
        if f'"name": "{tool}"' not in prompt:
            return "Note"  # a title for the conversation
        prompts.append(prompt)
        return [*calls, END][min(prompt.count("<tool_response>"), len(calls))]

    refused = Refused()
    with serving(scripted(script), observers=[refused], any_name=True) as running:
        own = ("ANTHROPIC", "CLAUDE", "CODEX", "OPENAI")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        environment |= {"HOME": str(tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DO_NOT_TRACK": "1"}
        environment |= {"ANTHROPIC_BASE_URL": running.url, "ANTHROPIC_AUTH_TOKEN": "none"}
        if agent == "claude":
            options = ["-p", TASK, "--permission-mode", "acceptEdits"]
        else:
            named = [word for each in CODEX for word in ("-c", each.format(url=running.url))]
            options = ["exec", *named, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
        done = subprocess.run(
            [PROGRAMS / agent, *options], env=environment, cwd=work, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=240, check=False,
        )  # fmt: skip
        running.at_rest()
    assert (done.returncode, done.stdout.strip().endswith(END)) == (0, True), (done.stdout, done.stderr)
    assert note.read_text() == "The sky is blue.\n"
    assert [prompt.count("<tool_response>") for prompt in prompts] == [0, 1, 2]
    assert "The sky is red." in prompts[1].partition("<tool_response>")[2]
    assert refused.messages == []
