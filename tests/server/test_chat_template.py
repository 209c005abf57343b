"""``--chat-template``: a template of chats in place of the model's own, its tool calls and reasoning included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outpace import Engine, ParameterError
from outpace.server.engines.models import system_fingerprint
from tests.server.published import PUBLISHED
from tests.server.serving import serving

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PAINT = {"type": "function", "function": {"name": "paint", "parameters": {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}}}  # fmt: skip
MINE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ eos_token }}[assistant] "


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_replaces_the_models(tmp_path: Path, as_file: bool) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(MINE, encoding="utf-8")
    with serving(Engine.load("demo", max_length=256, chat_template=str(path) if as_file else MINE)) as running:
        assert running.answer("/apply-template", {"messages": HI})["prompt"] == "[user] Hi\n<|im_end|>[assistant] "
        assert running.http.get("/props").json()["chat_template"] == MINE
        asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        chat = running.answer(CHAT, {"messages": HI, **asked})["choices"][0]
        text = running.answer("/v1/completions", {"prompt": "[user] Hi\n<|im_end|>[assistant] ", **asked})
        assert chat["message"]["content"] == text["choices"][0]["text"]
        prints = system_fingerprint(running.engine)
        assert prints.partition("-t")[2]


def test_calls_and_thoughts_are_the_templates() -> None:
    """What a grammar forces on the model is written as this template writes it, and read back."""
    forced = {"messages": HI, "tools": [PAINT], "tool_choice": "required", "temperature": 0, "max_tokens": 48}
    found = {}
    for name in ("functionary", "qwen3-coder"):
        with serving(Engine.load("demo", drafter="ngram", max_length=512, chat_template=PUBLISHED[name])) as running:
            choice = running.answer(CHAT, {**forced, "parallel_tool_calls": False, "return_token_ids": True})[
                "choices"
            ][0]
            written = running.answer("/detokenize", {"tokens": choice["token_ids"]})["content"]
            found[name] = (choice["message"], written)
    (message, written), (thinking, thought) = found.values()
    (call,) = message["tool_calls"]
    assert written.startswith("<function=paint>" + call["function"]["arguments"] + "</function>")
    assert thought.startswith("<think>\n" + thinking["reasoning_content"][:8])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0].content }}\n{% if x %}\n", "broken in line 2: Unexpected end of template"),
        (
            "{% for m in messages %}\n{{ m.content | nothing }}{% endfor %}",
            "broken in line 2: No filter",
        ),
        ("{% for m in messages %}\n{{ m.content + 1 }}\n{% endfor %}", "fails at a user's message in line 2"),
        ("{{ bos_token }}", "does not write what messages say"),
        ("nowhere.jinja", "cannot be read (No such file or directory): give a file with a Jinja template"),
    ],
)
def test_a_broken_template_is_an_error_at_start(template: str, says: str) -> None:
    with pytest.raises(ParameterError, match="chat_template") as found:
        Engine.load("no/such/model", chat_template=template)
    assert says in str(found.value)


def test_the_command_names_its_option(tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}", encoding="utf-8")
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "-m", "no/such/model", "--chat-template-file"]
    done = subprocess.run([*command, path.name], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"--chat-template {path.name} is broken in line 1" in done.stderr
