"""A stream that is resumed after any of its chunks goes on with the very same text, thoughts, calls and figures."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.server import formats
from tests.server.serving import Running
from tests.server.test_exact import EACH
from tests.server.test_families import STRICT, TOOLS, use

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "Weather in Rome? Red, green, blue, red, green,"}]
PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "ages": {"type": "array",
    "items": {"type": "integer"}, "maxItems": 3}}, "required": ["name", "ages"], "additionalProperties": False,
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
CHATS: dict[str, dict[str, Any]] = {
    "greedy, no seed": {"temperature": 0, "seed": None},
    "seed": {"temperature": 0.9, "top_p": 0.9, **LOGPROBS},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "repetition_penalty": 1.2, **LOGPROBS},
    "ends": {"temperature": 1.2, "min_tokens": 9, "stop": [" the", "e "], "bad_words": ["a", "is"]},
    "several": {"temperature": 1.3, "n": 3, "stop": [","], **LOGPROBS},
    "schema": {"temperature": 1, "response_format": SCHEMA},
    "regex": {"temperature": 2, "grammar": {"type": "regex", "value": "([a-z]{1,7} ){6}[0-9]+"}},
    "special": {"temperature": 1, "skip_special_tokens": False, "ignore_eos": True, "speculation": {"trace": True}},
}
PLAIN = {"off": True}


def asked(more: dict[str, Any]) -> dict[str, Any]:
    """With token ids, decoded plainly: a chunk for each token or two."""
    return {"max_tokens": 28, "seed": 7, "return_token_ids": True, "speculation": PLAIN, **more}


def put_together(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What the chunks of chats and completions say, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events:
        for part in chunk["choices"]:
            its = choices.setdefault(
                part["index"],
                {"content": "", "reasoning_content": "", "text": "", "calls": {}, "ids": [], "figures": [], "roles": 0},
            )
            delta = part.get("delta", {"content": part.get("text", "")})
            its["roles"] += "role" in delta
            for name in ("content", "reasoning_content"):
                its[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                known = its["calls"].setdefault(call["index"], {"id": call.get("id"), "name": "", "arguments": ""})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"].get("arguments", "")
            its["ids"] += part.get("token_ids", ())
            its["figures"] += figures(part["logprobs"])
            its["end"] = part["finish_reason"], part.get("stop_reason")
    return choices


def figures(logprobs: Any) -> list[Any]:
    """An entry a token."""
    if logprobs is None:
        return []
    listed: list[Any] = logprobs["content"] if "content" in logprobs else list(zip(*logprobs.values(), strict=True))
    return listed


def cost(events: list[Any]) -> Any:
    return [{name: c["usage"][name] for name in ("prompt_tokens", "completion_tokens")} for c in events if c["usage"]]


def delivered(events: list[Any], choices: int) -> Any:
    """``resume.token_ids`` after these chunks."""
    ids = [put_together(events).get(index, {"ids": []})["ids"] for index in range(choices)]
    return ids if choices > 1 else ids[0]


def check_every_cut(
    demo: Running, path: str, body: dict[str, Any], *, choices: int = 1, every: int = 1, least: int = 4
) -> Any:
    """The answer, which was resumed after every chunk that brought tokens, or every so manieth."""
    body = {**asked(body), "stream_options": {"include_usage": True}}
    events = demo.events(path, body)
    whole, spent = put_together(events), cost(events)
    cuts = [at + 1 for at, chunk in enumerate(events) if any(c.get("token_ids") for c in chunk["choices"])]
    assert len(cuts) >= least
    for at in [0, *cuts[::every], cuts[-1]]:
        for more in ({"speculation": None}, {"speculation": PLAIN}):
            ids = delivered(events[:at], choices)
            again = demo.events(path, {**body, **more, "resume": {"token_ids": ids, "verify": at % 2 == 0}})
            assert put_together(events[:at] + again) == whole
            assert cost(again) == spent
    demo.at_rest()
    return whole


@pytest.mark.parametrize("kind", CHATS)
def test_chats(demo: Running, kind: str) -> None:
    n = CHATS[kind].get("n", 1)
    whole = check_every_cut(demo, CHAT, {"messages": ASK, **CHATS[kind]}, choices=n, every=3)
    assert len(whole) == n
    assert all(choice["roles"] == 1 for choice in whole.values())


@pytest.mark.parametrize("turn", range(8))
def test_anything_with_anything(demo: Running, turn: int) -> None:
    drawn = random.Random(turn)
    names = drawn.sample(sorted(EACH.keys() - {"speculation"}), 7)
    more = {name: drawn.choice(EACH[name]) for name in names}
    if "grammar" in more:
        more["grammar"] = {"type": "regex", "value": more["grammar"]}
    if "top_logprobs" in more:
        more["logprobs"] = True
    body = {"messages": ASK, "temperature": 0.9, "max_tokens": 12, **more}
    check_every_cut(demo, CHAT, body, choices=more.get("n", 1), every=4, least=1)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "smollm2"])
def test_calls(demo: Running, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    use(demo, monkeypatch, formats.TEMPLATES[family])
    more = {"chat_template_kwargs": {"enable_thinking": False}} if family == "qwen3" else {}
    body = {"messages": ASK, "tools": STRICT, "tool_choice": "required", "max_tokens": 60, "seed": 4, **more}
    whole = check_every_cut(demo, CHAT, body, every=4)
    assert whole[0]["calls"]


def test_thoughts(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    use(demo, monkeypatch, formats.OPENING)
    ends = demo.engine.engine.encode("ab</think>cd", raw=True).tolist()
    for seed in range(40):
        body = {"messages": ASK, "allowed_token_ids": ends, "temperature": 5, "max_tokens": 40, "seed": seed}
        message = demo.answer(CHAT, body)["choices"][0]["message"]
        if message["content"] and message.get("reasoning_content"):
            break
    whole = check_every_cut(demo, CHAT, body, every=2)
    assert whole[0]["reasoning_content"]
    assert whole[0]["content"]


@pytest.mark.parametrize("echo", [False, True])
def test_completions(demo: Running, echo: bool) -> None:
    body = {"prompt": ["One, two,", "A, b, c"], "n": 2, "logprobs": 2, "echo": echo, "temperature": 1.1, "stop": ["\n"]}
    check_every_cut(demo, TEXTS, body, choices=4, every=5)


def of_items(events: list[Any]) -> dict[Any, str]:
    """The deltas of responses and messages put together, by what they belong to."""
    found: dict[Any, str] = {}
    for event in events:
        delta = event.get("delta")
        text = delta if isinstance(delta, str) else "".join(v for k, v in (delta or {}).items() if v and k in PARTS)
        if text:
            key = event.get("output_index", event.get("index"))
            found[key] = found.get(key, "") + text
    return found


PARTS = ("text", "thinking", "partial_json")


def bare(value: Any) -> str:
    """As JSON, but for ids and numbers that belong to one answer."""
    names = (
        "input_tokens",
        "id",
        "item_id",
        "created_at",
        "completed_at",
        "speculation",
        "sequence_number",
        "logprobs",
    )
    if isinstance(value, list):
        return json.dumps([bare(its) for its in value])
    if isinstance(value, dict):
        return json.dumps({name: bare(its) for name, its in value.items() if name not in names and "cache" not in name})
    return json.dumps(value)


TOOLS_HERE: dict[str, list[Any]] = {
    RESPONSES: [{"type": "function", **its["function"]} for its in TOOLS],
    MESSAGES: [{"name": its["function"]["name"], "input_schema": {"type": "object"}} for its in TOOLS],
}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (RESPONSES, {"input": "Red, green, blue, red,", "max_output_tokens": 20, "temperature": 0.8}),
        (RESPONSES, {"input": "Weather?", "max_output_tokens": 40, "tools": True, "tool_choice": "required"}),
        (MESSAGES, {"messages": ASK, "max_tokens": 20, "temperature": 0.8}),
        (MESSAGES, {"messages": ASK, "max_tokens": 40, "tools": True, "tool_choice": {"type": "any"}}),
    ],
)
def test_responses_and_messages(demo: Running, path: str, more: dict[str, Any]) -> None:
    body = {**more, "seed": 3, "return_token_ids": True, "speculation": PLAIN}
    if "tools" in body:
        body["tools"] = TOOLS_HERE[path]
    events = demo.events(path, body)
    cuts = [at + 1 for at, event in enumerate(events) if event.get("token_ids")]
    assert len(cuts) > 3
    for at in [*cuts[::3], cuts[-1]]:
        ids = [token for event in events[:at] for token in event.get("token_ids", ())]
        again = demo.events(path, {**body, "resume": {"token_ids": ids}, "speculation": None})
        assert of_items(events[:at] + again) == of_items(events)
        assert ids + [t for event in again for t in event.get("token_ids", ())] == [
            t for event in events for t in event.get("token_ids", ())
        ]
        kinds = [event["type"] for event in again]
        assert not {"response.created", "message_start"} & set(kinds)
        assert [bare(event) for event in again if event["type"] in ENDS] == [
            bare(event) for event in events if event["type"] in ENDS
        ]


ENDS = ("response.completed", "response.incomplete", "message_delta")


def test_an_answer_that_is_not_streamed_has_what_follows(demo: Running) -> None:
    body = {**asked({"messages": ASK, "temperature": 0.9, "max_tokens": 12}), "logprobs": True}
    whole = demo.answer(CHAT, body)
    ids = whole["choices"][0]["token_ids"]
    rest = demo.answer(CHAT, {**body, "resume": {"token_ids": ids[:5], "verify": True}})
    assert rest["choices"][0]["token_ids"] == ids[5:]
    assert rest["choices"][0]["logprobs"]["content"] == whole["choices"][0]["logprobs"]["content"][5:]
    assert whole["choices"][0]["message"]["content"].endswith(rest["choices"][0]["message"]["content"])
    assert (rest["usage"]["completion_tokens"], rest["seed"]) == (12, 7)


def test_a_stream_that_is_not_this_requests_begins_with_the_error(demo: Running) -> None:
    body = {"messages": ASK, "temperature": 0, "max_tokens": 20, "resume": {"token_ids": [57] * 12, "verify": True}}
    [refused] = demo.events(CHAT, body)
    assert refused["error"]["param"] == "resume"
    assert "at index 4" in refused["error"]["message"]  # the first of the last eight
    demo.at_rest()


def test_every_chunk_has_the_seed_that_was_drawn(demo: Running) -> None:
    body = {**asked({"messages": ASK, "max_tokens": 6}), "seed": None}
    events = demo.events(CHAT, body)
    [seed] = {chunk["seed"] for chunk in events if chunk["choices"][0].get("token_ids")}
    at = next(at for at, chunk in enumerate(events) if chunk["choices"][0].get("token_ids"))
    again = demo.events(CHAT, {**body, "seed": seed, "resume": {"token_ids": delivered(events[: at + 1], 1)}})
    assert put_together(events[: at + 1] + again) == put_together(events)


@pytest.mark.parametrize(
    ("resume", "more", "says"),
    [
        ({"token_ids": [-1]}, {}, "token id -1"),
        ({"token_ids": [1 << 40]}, {}, "token id 1099511627776"),
        ({"token_ids": [57], "verify": True}, {"temperature": 0, "messages": ASK}, "where this request chooses"),
        ({"token_ids": [[57], [57]]}, {}, "of 2 choices, but the request has 1"),
        ({"token_ids": [57]}, {"n": 2}, "of 1 choices, but the request has 2"),
        ({"token_ids": [57]}, {"seed": None}, "needs the seed"),
        ({"token_ids": [57]}, {"response_format": SCHEMA}, "token 57 at index 0, which a rule"),
        ({"token_ids": [57] * 9}, {"max_tokens": 8}, "token 57 at index 7 ends the answer"),
        ({"token_ids": [57]}, {"speculation": {"acceptance": "rejection"}}, "cannot be resumed"),
    ],
)
def test_what_cannot_be_this_requests_is_refused(demo: Running, resume: Any, more: Any, says: str) -> None:
    refused = demo.answer(CHAT, {"messages": ASK, "seed": 1, "max_tokens": 20, "resume": resume, **more}, 400)["error"]
    assert says in refused["message"]
    demo.at_rest()
