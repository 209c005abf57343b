"""``POST /v1/replay`` on a server: what it said it says again; whatever is altered in an answer is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.serving import Running

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name a colour, then a number."}],
    "min_tokens": 8, "max_tokens": 12, "temperature": 0.9, "logprobs": True, "top_logprobs": 2, "n": 2,
    "return_token_ids": True, "speculation": {"off": True},
}  # fmt: skip
TEXTS = {"prompt": ["One, two,", "A, b,"], "max_tokens": 6, "temperature": 0, "return_token_ids": True}


def ask(demo: Running, path: str, body: Any, status: int = 200) -> Any:
    return demo.answer(path, body, status)


@pytest.fixture(scope="module")
def chat(demo: Running) -> Any:
    return ask(demo, "/v1/chat/completions", CHAT)


def test_answers_are_said_again(demo: Running, chat: Any) -> None:
    said = ask(demo, "/v1/replay", {"request": CHAT, "answer": chat})
    assert said["identical"], said
    assert said["tokens"] == chat["usage"]["completion_tokens"]
    assert said["system_fingerprint"] == dict.fromkeys(("recorded", "now"), chat["system_fingerprint"])
    texts = ask(demo, "/v1/completions", TEXTS)
    assert ask(demo, "/v1/replay", {"request": TEXTS, "answer": texts})["identical"]
    for choice in texts["choices"]:
        del choice["token_ids"]
    assert ask(demo, "/v1/replay", {"request": TEXTS, "answer": texts})["identical"]
    parsed = demo.client().chat.completions.create(
        model="demo", messages=CHAT["messages"], max_tokens=8, seed=4, logprobs=True
    )  # fmt: skip
    asked = {"model": "demo", "messages": CHAT["messages"], "max_tokens": 8, "logprobs": True}
    assert ask(demo, "/v1/replay", {"request": asked, "answer": parsed.model_dump()})["identical"]
    demo.at_rest()


def other_id(answer: Any) -> None:
    answer["choices"][1]["token_ids"][5] += 1


def unknown_id(answer: Any) -> None:
    answer["choices"][1]["token_ids"][5] = 99_999


def one_less(answer: Any) -> None:
    its = answer["choices"][1]
    its["logprobs"], its["token_ids"] = None, its["token_ids"][:5]


def other_bit(answer: Any) -> None:
    answer["choices"][1]["logprobs"]["content"][5]["logprob"] *= 1 + 2**-52


def other_text(answer: Any) -> None:
    answer["choices"][1]["message"]["content"] += "!"


def other_alternative(answer: Any) -> None:
    answer["choices"][1]["logprobs"]["content"][5]["top_logprobs"][1]["token"] += "x"


def other_end(answer: Any) -> None:
    its = answer["choices"][1]
    its["finish_reason"] = "length" if its["finish_reason"] == "stop" else "stop"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_id, "token"),
        (unknown_id, "token"),
        (one_less, "token"),
        (other_bit, "logprob"),
        (other_text, "message.content"),
        (other_alternative, "logprobs.content.top_logprobs.token"),
        (other_end, "finish"),
    ],
)
def test_what_was_altered_is_named(demo: Running, chat: Any, change: Callable[[Any], None], what: str) -> None:
    altered = copy.deepcopy(chat)
    change(altered)
    said = ask(demo, "/v1/replay", {"request": CHAT, "answer": altered})
    assert [its["identical"] for its in said["choices"]] == [True, False]
    found = said["choices"][1]["difference"]
    assert found["what"] == what
    if what in ("token", "logprob"):
        assert found["index"] == 5
    assert (found["gap"] is not None) == (change is other_id)
    demo.at_rest()


def test_a_gap_is_that_of_its_own_prompt(demo: Running) -> None:
    """Also where several were asked together, and part from their records at one place."""
    texts = ask(demo, "/v1/completions", TEXTS)
    for choice in texts["choices"]:
        choice["token_ids"][0] += 1
    together = ask(demo, "/v1/replay", {"request": TEXTS, "answer": texts})["choices"]
    for prompt, choice, found in zip(TEXTS["prompt"], texts["choices"], together, strict=True):
        answer = {**texts, "choices": [choice]}
        (alone,) = ask(demo, "/v1/replay", {"request": {**TEXTS, "prompt": prompt}, "answer": answer})["choices"]
        assert found["difference"] == alone["difference"]
        assert found["difference"]["gap"] > 0
    demo.at_rest()


def test_responses_are_said_again(demo: Running) -> None:
    """Text with its log-probabilities, calls, and an answer that the length ended; what was altered is named."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tool = {"type": "function", "name": "paint", "parameters": schema}
    asked = {"input": "Name a colour, then a number.", "temperature": 0.9}
    short = {**asked, "max_output_tokens": 6, "ignore_eos": True}
    told = {**short, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "return_token_ids": True}
    calls = {**asked, "tools": [tool], "tool_choice": "required", "max_output_tokens": 40, "return_token_ids": True}
    requests = {"short": short, "told": told, "calls": calls}
    kept = {name: ask(demo, "/v1/responses", its) for name, its in requests.items()}
    for name, its in requests.items():
        said = ask(demo, "/v1/replay", {"request": its, "answer": kept[name]})
        assert said["identical"], (name, said)
        assert said["tokens"] == kept[name]["usage"]["output_tokens"]
    assert kept["short"]["status"] == "incomplete"
    assert kept["calls"]["output"][0]["type"] == "function_call"

    def altered(name: str, request: Any, change: Callable[[Any], None]) -> str:
        answer = copy.deepcopy(kept[name])
        change(answer)
        (choice,) = ask(demo, "/v1/replay", {"request": request, "answer": answer})["choices"]
        return str(choice["difference"]["what"])

    def part(answer: Any) -> Any:
        return answer["output"][0]["content"][0]

    assert altered("told", told, lambda its: its["token_ids"].__setitem__(3, its["token_ids"][3] + 1)) == "token"
    assert altered("told", told, lambda its: part(its)["logprobs"][2].update(logprob=-0.5)) == "logprob"
    assert altered("told", told, lambda its: part(its).update(text="x")) == "output.content.text"
    assert altered("told", told, lambda its: its.update(status="completed")) == "finish"
    assert altered("short", short, lambda its: part(its).update(text="x")) == "text"
    assert altered("calls", calls, lambda its: its["output"][0].update(arguments='{"n": "x"}')) == "output.arguments"
    for request, answer, message in [
        (calls, {**kept["calls"], "token_ids": None}, "ask with return_token_ids"),
        (short, {**kept["short"], "output": [{"type": "message"}]}, "none of this server's"),
        (short, {**kept["short"], "object": "chat.completion"}, "asks for another"),
    ]:
        assert message in ask(demo, "/v1/replay", {"request": request, "answer": answer}, 400)["error"]["message"]
    demo.at_rest()


def test_what_cannot_be_replayed_is_refused(demo: Running, chat: Any) -> None:
    nameless = {**chat, "seed": None}
    for request, answer, message in [
        (CHAT, nameless, "seed is missing"),
        (CHAT, {**chat, "choices": chat["choices"][:1]}, "2 choices, the answer 1"),
        (CHAT, {**chat, "choices": [3, 4]}, "answer.choices"),
        (CHAT, {**chat, "choices": [{}, {}]}, "no choice of this server's"),
        (CHAT, {**chat, "object": "text_completion"}, "asks for another"),
        ({**CHAT, "speculation": {"acceptance": "rejection"}}, chat, "not the same tokens"),
        ({**TEXTS, "echo": True}, {**chat, "object": "text_completion"}, "leave echo out"),
        ({**CHAT, "logit_bais": {}}, chat, "logit_bias"),
    ]:
        told = ask(demo, "/v1/replay", {"request": request, "answer": answer}, 400)["error"]
        assert message in told["message"], told
        assert told["type"] == "invalid_request_error"
    demo.at_rest()
