"""What runs where: requests are read and answers written beside the engine, and nobody waits for a forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace import Engine, Grammars, SamplingParams
from outpace.server.api import replay, route
from outpace.server.api.chat import ChatCompletion
from outpace.text.grammar import MARK
from outpace.text.tokenizer import Tokenizer
from tests.interpreter import lets_others_run
from tests.server.serving import Running, serving

MESSAGES = [{"role": "user", "content": "Count to ten."}]
CHAT = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def its() -> Iterator[Running]:
    """A server whose steps a test may hold."""
    with serving(Engine.load("demo", drafter="ngram", max_length=512)) as running:
        yield running


def post(its: Running, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = its.post(path, body)
    return answer.status_code, answer.json()


def test_while_a_step_lasts_everything_else_is_answered(its: Running) -> None:
    expected = post(its, "/v1/chat/completions", CHAT)[1]["choices"]
    with ThreadPoolExecutor(1) as threads:
        with its.held() as reached:
            waiting = threads.submit(post, its, "/v1/chat/completions", CHAT)
            assert reached.wait(30)
            for path in ("/health", "/ready", "/v1/models", "/docs", "/openapi.json", "/"):
                assert its.http.get(path).status_code == 200
            assert post(its, "/tokenize", {"messages": MESSAGES})[1]["count"] > 3
            assert post(its, "/v1/chat/completions", {**CHAT, "n": 0})[0] == 400
            assert post(its, "/v1/chat/completions", {**CHAT, "grammar": {"type": "regex", "value": "("}})[0] == 400
            assert not waiting.done()
        assert waiting.result()[1]["choices"] == expected
    its.at_rest()


def test_requests_are_read_and_answers_written_in_threads_of_their_own(
    its: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates, tokens, grammars and JSON. What the engine itself tokenises is the next few forced characters."""
    where: dict[str, set[str]] = {}

    def watched(kind: Any, name: str) -> None:
        original = getattr(kind, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not (name == "encode" and arguments[1].startswith(MARK)):
                where.setdefault(name, set()).add(threading.current_thread().name)
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, call)

    for kind, name in ((Tokenizer, "encode"), (Tokenizer, "render_chat"), (Grammars, "_compiled"), (Engine, "prepare")):
        watched(kind, name)
    watched(route, "understood")
    watched(ChatCompletion, "to_json")
    tool = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
    for more in ({"response_format": FORMAT}, {"tools": [tool], "tool_choice": "required"}, {"stream": True}):
        answer = its.post("/v1/chat/completions", {**CHAT, "ignore_eos": False, **more})
        assert answer.status_code == 200
    assert where.keys() == {"encode", "render_chat", "_compiled", "prepare", "understood", "to_json"}
    for name, threads in where.items():
        assert all(thread.startswith("outpace-request") for thread in threads), (name, threads)


def test_recorded_answers_are_read_and_told_of_in_threads_of_their_own(
    its: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have up to a million values."""
    where: dict[str, str] = {}

    def watch(name: str) -> None:
        original = getattr(replay, name)

        def call(*arguments: Any) -> Any:
            where[name] = threading.current_thread().name
            return original(*arguments)

        monkeypatch.setattr(replay, name, call)

    for name in ("_recorded", "_recorded_response", "_kept", "_told"):
        watch(name)
    text = {"input": "Count to ten.", "max_output_tokens": 4, "temperature": 0}
    for path, asked in (("/v1/chat/completions", CHAT), ("/v1/responses", text)):
        its.answer("/v1/replay", {"request": asked, "answer": its.answer(path, asked)})
    assert where.keys() == {"_recorded", "_recorded_response", "_kept", "_told"}
    assert all(thread.startswith("outpace-request") for thread in where.values()), where


def test_forwards_and_compiling_let_others_run(its: Running) -> None:
    engine = its.engine.engine
    grammars = Grammars.of(engine)
    grammars.regex("a")  # reads the vocabulary
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 40}}}$"} for i in range(200)}
    assert lets_others_run(lambda: grammars.json_schema({"properties": properties}))
    with Engine.load("demo", drafter="none", max_length=512) as alone:
        assert lets_others_run(lambda: alone.generate(list(range(9, 200)), SamplingParams(max_tokens=1)))
