"""``/api/chat`` and ``/api/generate``: the same answers as chats' and completions', in Ollama's form; its own package
reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.foreign import results_of
from tests.server.serving import Running

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Paint it."}]
SCHEMA = {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip
PAINT = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
CALL = {"function": {"name": "paint", "arguments": {"colour": "red"}}}
OPTIONS = {"seed": 1, "num_predict": 24, "num_ctx": 2048, "temperature": 0.5}
SAME = {"seed": 1, "max_tokens": 24, "temperature": 0.5}


def lines(demo: Running, path: str, body: dict[str, Any]) -> list[Any]:
    answer = demo.post(path, body)
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/api/chat", {"messages": ASK, "logprobs": True, "top_logprobs": 2}, {"messages": ASK}),
    ("/api/chat", {"messages": ASK, "format": SCHEMA, "model": "demo:latest"}, {
        "messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    }),
    ("/api/chat", {"messages": ASK, "format": "json", "think": False, "keep_alive": "5m"}, {
        "messages": ASK, "response_format": {"type": "json_object"},
    }),
    ("/api/chat", {"messages": [
        *ASK, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "done"},
        {"role": "tool", "content": "done, too", "tool_name": "paint"},
    ], "tools": [PAINT]}, {"messages": [
        *ASK, {"role": "assistant", "content": "", "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
            for name in "ab"
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
        {"role": "tool", "tool_call_id": "b", "content": "done, too"},
    ], "tools": [PAINT]}),
    ("/api/generate", {"prompt": "Paint it.", "system": "Be brief.", "context": []}, {
        "messages": [{"role": "system", "content": "Be brief."}, *ASK],
    }),
    ("/api/generate", {"prompt": "Red and blue", "raw": True, "format": ""}, {"prompt": "Red and blue"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "same"), ASKED)
def test_answers_are_those_of_chats_and_completions(
    demo: Running, path: str, body: dict[str, Any], same: dict[str, Any]
) -> None:
    body = {"model": "demo", "options": OPTIONS, **body}
    expected = demo.answer(TEXTS if "prompt" in same else CHAT, {**same, **SAME})
    choice, used = expected["choices"][0], expected["usage"]
    text = choice["text"] if "prompt" in same else choice["message"]["content"]
    whole = demo.answer(path, {**body, "stream": False})
    parts = lines(demo, path, body)
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    if path == "/api/chat":
        assert whole["message"] == {"role": "assistant", "content": text}
        assert "".join(part["message"]["content"] for part in parts) == text
    else:
        assert whole["response"] == "".join(part["response"] for part in parts) == text
    for end in (whole, parts[-1]):
        assert (end["model"], end["done_reason"], end["seed"]) == (body["model"], choice["finish_reason"], 1)
        assert (end["prompt_eval_count"], end["eval_count"]) == (used["prompt_tokens"], used["completion_tokens"])
        assert 0 < end["prompt_eval_duration"] < end["total_duration"]
    entries = [entry for part in parts for entry in part.get("logprobs", [])]
    assert entries == whole.get("logprobs", [])
    assert len(entries) == ("logprobs" in body) * used["completion_tokens"]
    demo.at_rest()


def test_calls_come_whole(demo: Running) -> None:
    """Ollama has no tool_choice; beside a format an answer is a call or in the format, and here it is a call."""
    body = {"model": "demo", "messages": ASK, "tools": [PAINT], "format": SCHEMA}
    body["options"] = {"seed": 1, "num_predict": 60}
    whole = demo.answer("/api/chat", {**body, "stream": False})
    parts = lines(demo, "/api/chat", body)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert call["function"]["arguments"]["colour"] in ("red", "blue")
    assert [part["message"]["tool_calls"] for part in parts if "tool_calls" in part["message"]] == [[call]]
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] == ""


@pytest.mark.parametrize(
    ("path", "more", "status", "named"),
    [
        ("/api/chat", {"model": "llama9"}, 404, "llama9"),
        ("/api/chat", {"think": "hard"}, 400, "think"),
        ("/api/chat", {"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ("/api/chat", {"options": {"top_p": 2}}, 400, "top_p"),
        ("/api/chat", {"options": {"num_predct": 2}}, 400, "options.num_predct"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "messages.0.images"),
        ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "raw"),
        ("/api/generate", {"prompt": "x", "format": {"type": "strang"}}, 400, "strang"),
    ],
)
def test_errors_are_ollamas(demo: Running, path: str, more: dict[str, Any], status: int, named: str) -> None:
    base = {"messages": ASK} if path == "/api/chat" else {}
    found = demo.answer(path, {"model": "demo", **base, **more}, status)
    assert set(found) == {"error"}
    assert named in found["error"]


def test_bodies_need_no_content_type_but_from_pages(demo: Running) -> None:
    data = json.dumps({"model": "demo"})
    url, form = "/api/generate", "application/x-www-form-urlencoded"

    def status(path: str, **headers: str) -> int:
        return demo.http.post(path, content=data, headers=headers).status_code

    assert [status(url), status(url, **{"content-type": form})] == [200, 200]
    for named in ({"origin": demo.url}, {"sec-fetch-site": "same-origin"}, {"content-type": "text/plain"}):
        assert status(url, **named) == 415
    assert status("/v1/completions") == 415


def test_a_fault_in_mid_stream_is_the_last_line(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any, part: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("outpace.server.api.ollama.OllamaEncoder.part", faulty)
    *_, last = lines(demo, "/api/chat", {"model": "demo", "messages": ASK})
    assert set(last) == {"error"}
    monkeypatch.undo()
    demo.at_rest()


def test_what_is_asked_beside_answers(demo: Running) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert demo.answer(path, {"model": "demo"})["done_reason"] == "load"
    for path in ("/api/tags", "/api/ps"):
        (model,) = demo.http.get(path).json()["models"]
        assert (model["name"], model["size"] > 0) == ("demo", True)
    shown = demo.answer("/api/show", {"model": "demo:latest"})
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["outpace.context_length"] == 2048
    assert demo.http.head("/").status_code == 200
    assert demo.http.get("/api/version").json() == demo.http.get("/version").json()


SCRIPT = """
import ollama
client = ollama.Client(host=URL)
asked = dict(model="demo", messages=ASK, options={"seed": 1, "num_predict": 12})
answer = client.chat(**asked)
found = [answer.message.content, "".join(part.message.content for part in client.chat(**asked, stream=True))]
few = {"seed": 1, "num_predict": 4}
found.append(client.generate(model="demo", prompt="Red and", raw=True, options=few).eval_count)
def paint(colour: str) -> str:
    '''Paints.

    Args:
      colour: which
    '''
asked["options"]["num_predict"] = 60
tooled = client.chat(**{**asked, "messages": [*ASK, answer.message, *ASK]}, tools=[paint], format=SCHEMA)
found += [tooled.message.content or tooled.message.tool_calls[0].function.name, client.list().models[0].model]
found += [client.ps().models[0].model, "tools" in client.show("demo").capabilities]
try:
    client.chat(model="other", messages=ASK)
except ollama.ResponseError as error:
    found += [error.status_code, error.error]
"""


def test_their_package_reads_it(demo: Running, tmp_path: Path) -> None:
    text, streamed, count, tooled, listed, loaded, tools, status, error = results_of(
        "agents", "ollama", SCRIPT, demo.url, tmp_path, ASK=ASK, SCHEMA=SCHEMA
    )
    assert text == streamed
    assert (count, listed, loaded, tools, status) == (4, "demo", "demo", True, 404)
    assert "colour" in tooled or tooled == "paint"
    assert "'other' is not served" in error
    demo.at_rest()
