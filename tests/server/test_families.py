"""Tools and thoughts over the wire, with the templates of five families and every kind of ``tool_choice``."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace.server.conversation.formats import parser_for
from outpace.text.chat_template import ChatTemplates
from tests.server import formats, published
from tests.server.serving import Running

MARKED = "<jupyter_code>{{ f.name }}<jupyter_text>" + "{{ f.arguments | tojson }}<jupyter_output>"  # control tokens
FAMILIES = {
    **formats.TEMPLATES, "hermes": formats.HERMES, "hermes with tools": formats.HERMES_TOOLS,
    "control tokens": published.template("<file_sep>" + published.each(MARKED) + "<empty_output>"),
    "tags": published.PUBLISHED["qwen3-coder"].replace("</think>", ""),
    "braces": published.PUBLISHED["gemma-4"].replace("<channel|>", ""),
}  # fmt: skip
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
ASKED: dict[str, dict[str, Any]] = {
    "none": {"tools": TOOLS, "tool_choice": "none"},
    "auto": {"tools": TOOLS},
    "auto, strict": {"tools": STRICT, "parallel_tool_calls": False},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "required, one": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
}


def use(demo: Running, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """The demo model with another chat template."""
    tokenizer: Any = demo.engine.engine.tokenizer
    templates = ChatTemplates({"default": template}, {"bos_token": "<|im_start|>"})
    monkeypatch.setattr(tokenizer, "_templates", templates)


def ask(demo: Running, more: dict[str, Any]) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Weather in Rome?"}], "max_tokens": 96, "seed": 4, **more}
    if not more.get("stream"):
        choice: dict[str, Any] = demo.answer("/v1/chat/completions", body)["choices"][0]
        return choice
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "finish_reason": None}
    for chunk in demo.events("/v1/chat/completions", body):
        part = chunk["choices"][0]
        found["finish_reason"] = part["finish_reason"]
        for name in ("content", "reasoning_content"):
            found[name] += part["delta"].get(name, "")
        for call in part["delta"].get("tool_calls", ()):
            its = found["tool_calls"].setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
            its["name"] += call["function"].get("name", "")
            its["arguments"] += call["function"].get("arguments", "")
    return found


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """An answer that was not streamed, as ``ask`` puts one together that was."""
    message = choice["message"]
    calls = [{"id": its["id"], **its["function"]} for its in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": dict(enumerate(calls)),
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_choice_of_every_family(demo: Running, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    use(demo, monkeypatch, FAMILIES[family])
    more = {"chat_template_kwargs": {"enable_thinking": False}} if family == "qwen3" else {}
    with ThreadPoolExecutor(12) as threads:
        drafted = {k: threads.submit(ask, demo, {**its, **more, "stream": True}) for k, its in ASKED.items()}
        plainly = {
            k: threads.submit(ask, demo, {**its, **more, "speculation": {"off": True}}) for k, its in ASKED.items()
        }
        said = {kind: flat(its.result()) for kind, its in plainly.items()}
        assert {kind: its.result() for kind, its in drafted.items()} == said
    calls = {kind: list(its["tool_calls"].values()) for kind, its in said.items()}
    assert calls["none"] == []
    for kind in ("required", "required, one", "named"):
        ended = said[kind]["finish_reason"] == "tool_calls"  # else a later call was cut off, perhaps as text
        whole = calls[kind] if ended else calls[kind][:1]
        assert whole
        assert said[kind]["content"] == "" or not ended
        for call in whole:
            arguments = json.loads(call["arguments"])
            assert arguments.get("city") in ("Rome", "Oslo") if call["name"] == "weather" else arguments == {}
    for kind in ("required, one", "named"):
        assert (len(calls[kind]), said[kind]["finish_reason"]) == (1, "tool_calls")
    assert calls["named"][0]["name"] == "weather"
    demo.at_rest()


def test_a_format_begins_after_the_thoughts(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are written of three tokens alone, so that many soon have the end of reasoning, wherever in a draft."""
    use(demo, monkeypatch, formats.OPENING)
    tokenizer: Any = demo.engine.engine.tokenizer
    ends = tokenizer.encode("</think>", add_special=False).tolist()
    wanted = {
        "grammar": {"type": "regex", "value": "(think|</)>>"}, "allowed_token_ids": [*ends, *tokenizer.eos_ids],
        "temperature": 5, "max_tokens": 90,
    }  # fmt: skip
    switched = 0

    def said(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        streamed = ask(demo, {**wanted, "seed": seed, "stream": True, "speculation": {"size": 4}})
        return streamed, ask(demo, {**wanted, "seed": seed, "speculation": {"off": True}, "return_token_ids": True})

    with ThreadPoolExecutor(4) as threads:
        for seeds in (range(first, first + 4) for first in range(0, 80, 4)):
            for its, whole in threads.map(said, seeds):
                assert its == flat(whole)
                if its["finish_reason"] == "stop":
                    assert re.fullmatch(r"(?s).*?</think>(think|</)>>", tokenizer.decode(whole["token_ids"]))
                    switched += 1
            if switched >= 2:
                return
    raise AssertionError("hardly an answer came to its end")


def test_a_model_of_no_known_family_takes_no_tools(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    use(demo, monkeypatch, formats.CODER)
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 2}
    assert demo.answer("/v1/chat/completions", body, 400)["error"]["param"] == "tools"


def test_hermes_calls_are_read_in_its_own_order() -> None:
    text = '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "weather"}\n</tool_call>'
    for template in (formats.HERMES, formats.HERMES_TOOLS):
        parser = parser_for(template, tools=True, reasoning=True, tool_id=str, schemas={"weather": {}})
        (call,) = formats.read(parser, text).calls
        assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
