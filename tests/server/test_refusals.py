"""What is wrong is refused by name, with an error that OpenAI's clients understand; nothing is ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from outpace import Engine
from outpace.server.api.anthropic import MessagesRequest
from outpace.server.api.chat import ChatRequest
from outpace.server.api.completions import CompletionRequest
from outpace.server.api.models import DetokenizeRequest, EmbeddingsRequest, TokenizeRequest
from outpace.server.api.ollama import OllamaChatRequest, OllamaGenerateRequest
from outpace.server.api.responses import ResponsesRequest
from outpace.server.auth import Web
from outpace.server.errors import APIError
from outpace.server.fields import FIELDS
from outpace.server.schema import Body, Unknown
from outpace.server.settings import ServerSettings
from tests.server.serving import Running, serving

MESSAGES = [{"role": "user", "content": "Hello"}]
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}
PATHS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}


def post(demo: Running, path: str, data: bytes | dict[str, Any], **headers: str) -> tuple[int, Any]:
    answer = demo.post(path, data, **headers)
    return answer.status_code, answer.json()


def check(status: int, answer: Any, *statuses: int) -> dict[str, Any]:
    assert status in (statuses or range(400, 500)), answer
    assert set(answer) == {"error"}
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"Temperature": 1}, "Temperature"),
        ({"n": 100000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"temprature": 1}, "temprature"),
        ({"speculation": {"drafter": "psychic"}}, "speculation.drafter"),
        ({"speculation": {"size": 64}}, "speculation.size"),
        ({"speculation": {"off": True, "size": 3}}, "speculation.off"),
        ({"speculation": {"sise": 3}}, "speculation.sise"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"grammar": {"type": "regex", "value": "("}}, "grammar"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"model": "gpt-5"}, "model"),
        ({"stop": [str(i) for i in range(65)]}, "stop"),
        ({"tools": [{"type": "function", "function": STRICT}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "a"}]}, "messages.0.reasoning_content"),
        ({"deadline": 0}, "deadline"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_is_wrong_is_named(demo: Running, more: dict[str, Any], param: str) -> None:
    status, answer = post(demo, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **more})
    error = check(status, answer, 404 if "model" in more else 400)
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [10**9]}, "prompt"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"grammar": {"type": "lark", "value": 'start: "'}}, "grammar"),
        ("/tokenize", {"messages": MESSAGES}, "prompt"),
        ("/tokenize", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": None, "messages": MESSAGES, "add_special_tokens": False}, "add_special_tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens"),
    ],
)
def test_other_routes_name_it_too(demo: Running, path: str, more: dict[str, Any], param: str) -> None:
    assert check(*post(demo, path, {**GOOD[path], **more}), 400)["param"] == param


@pytest.mark.parametrize("words", [3000, 200_000])
def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(demo: Running, words: int) -> None:
    text = " word" * words
    for path in ANSWERING:
        name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        body = {name: [{"role": "user", "content": text}] if name == "messages" else text}
        error = check(*post(demo, path, body), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is ")
    refused = demo.answer("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}, 400)
    found = re.fullmatch(r"prompt is too long: (\d+) (tokens|characters) > (\d+) maximum", refused["error"]["message"])
    assert found is not None
    assert int(found[1]) > int(found[3])
    if words == 3000:
        assert (found[2], found[3]) == ("tokens", "2047")
    demo.answer("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": " word" * 3000}]})


@pytest.mark.parametrize(
    "more",
    [
        {"grammar": {"type": "regex", "value": "(yes|no)"}, "min_tokens": 8},
        {"grammar": {"type": "regex", "value": "[a-z]+"}, "allowed_token_ids": [28]},
        {"grammar": {"type": "lark", "value": 'start: e\ne: e e e | e e | "a"'}},
    ],
)
def test_what_turns_out_to_be_impossible_is_the_requests_fault(demo: Running, more: dict[str, Any]) -> None:
    """Rules that leave no token, or become too complex, while the answer is written: no 5xx, and nobody else's."""
    body = {**GOOD["/v1/chat/completions"], "max_tokens": 40, "temperature": 0, **more}
    error = check(*post(demo, "/v1/chat/completions", body), 400)
    assert error["code"] == "no_answer", error
    demo.at_rest()


@pytest.mark.parametrize(("rules", "status"), [(2000, 200), (4000, 400)])
def test_grammars_that_refer_and_refer_do_not_overflow_the_stack(demo: Running, rules: int, status: int) -> None:
    """llguidance follows references by recursion: before, 3,000 in a chain ended the process."""
    references = {f"{i}": {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(rules)}
    schema = {"$ref": "#/$defs/0", "$defs": {**references, f"{rules}": {"type": "null"}}}
    lark = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(rules - 2)) + f'a{rules - 2}: "x"'
    good = GOOD["/v1/completions"]
    demo.answer("/v1/completions", {**good, "grammar": {"type": "lark", "value": lark}}, status)
    assert demo.post("/v1/completions", {**good, "guided_json": schema}).status_code in (200, 400)


def test_names_are_checked_elsewhere_than_on_loopback_where_some_are_allowed() -> None:
    web, open_ = Web(ServerSettings(host="0.0.0.0", allow_hosts=("a.example",))), Web(ServerSettings(host="0.0.0.0"))
    for name in ("a.example", "10.0.0.7:8000", "localhost"):
        web.check(name, None)
    open_.check("evil.example", None)
    with pytest.raises(APIError, match="--allow-host"):
        web.check("evil.example", None)


ECHOED = {  # an answer's message as openai's helpers and other clients send it back
    "role": "assistant", "content": None, "refusal": None, "annotations": [], "parsed": None, "reasoning": "Well.",
    "provider_specific_fields": {}, "tool_calls": [{
        "index": 0, "id": "a", "type": "function",
        "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
    }],
}  # fmt: skip
CACHED = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [CACHED, ECHOED, {"role": "tool", "tool_call_id": "a", "content": "1"}]}),
        ("/v1/chat/completions", {"messages": [{**ECHOED, "content": "x", "tool_calls": None, "refusal": "no"}]}),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}, "parallel_tool_calls": True}),
        ("/v1/completions", {"best_of": 1, "use_beam_search": False, "echo": False}),
        (
            "/v1/responses",
            {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "top_logprobs": 0},
        ),
        *((path, dict.fromkeys(FIELDS.keys() - GOOD[path].keys())) for path in ANSWERING),
        *((path, {"suffix": "", "mirostat": 0, "typical_p": 1.0, "do_sample": True}) for path in ANSWERING),
        *((path, {"store": True, "metadata": {"a": "b"}, "service_tier": "auto"}) for path in ANSWERING),
        *((path, {"safety_identifier": "x", "prompt_cache_key": "y", "user": "z"}) for path in ANSWERING),
        *((path, {"prompt_cache_retention": "24h"}) for path in ANSWERING),
    ],
)
def test_what_changes_nothing_is_taken(demo: Running, path: str, more: dict[str, Any]) -> None:
    demo.answer(path, {**GOOD[path], **more})


@pytest.mark.parametrize("path", ANSWERING)
def test_what_others_know_is_refused_with_the_reason(demo: Running, path: str) -> None:
    for name, other in FIELDS.items():
        if other.takes is None and name not in PATHS[path].model_fields:
            error = demo.answer(path, {**GOOD[path], name: {"a": 1}}, 400)["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert other.why in error["message"]


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs=-1 would be of the whole vocab"),
        ("/v1/completions", {"prompt": "a", "return_tokens_as_token_ids": True}, "return_token_ids gives ids"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
        ("/v1/completions", {"prompt": "a", "suffix": 5}, "suffix: Input should be a valid string"),
        ("/v1/chat/completions", {"messages": [], "n": "2"}, "n: Input should be a valid integer"),
        ("/v1/chat/completions", {"messages": [], "tools": 5}, "tools: Input should be a valid array"),
        ("/infill", {"input_prefix": "", "input_suffix": "", "prompt": 5}, "prompt: Input should be a valid string"),
        ("/api/generate", {"model": "demo", "prompt": "a", "images": ["x"]}, "images is not supported: this server"),
        (
            "/api/generate",
            {"model": "demo", "prompt": "a", "options": {"mirostat": 2}},
            "options.mirostat is not supported: this way of sampling is not offered: use",
        ),
        ("/api/generate", {"model": "demo", "options": {"num_predict": "9"}}, "options.num_predict: Input should be"),
    ],
)
def test_a_wrong_value_is_not_taken_for_a_field_of_other_routes(
    demo: Running, path: str, more: dict[str, Any], said: str
) -> None:
    assert said in str(demo.answer(path, more, 400)["error"])


PART, MORE = {"type": "text", "text": "Hi"}, {"colour": {"a": [1]}}
TOOL = {"type": "function", "function": {"name": "f", **MORE}, **MORE}
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "Hi", **MORE}, "colour"),
    ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True, **MORE}}, "stream_options.colour"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{**PART, **MORE}], **MORE}], "tools": [TOOL]},
     "messages.0.content.0.colour"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{**PART, "citations": [], **MORE}]}]},
     "messages.0.content.0.citations"),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi", **MORE}]}, "input.0.colour"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), UNKNOWN)
def test_unknown_fields_are_ignored_and_logged_once_or_refused(
    demo: Running, strict: Running, path: str, body: dict[str, Any], param: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They change nothing: the prompt is the same without them, tools included."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            more = {*MORE, "citations"}
            return {name: without(inner) for name, inner in value.items() if name not in more}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    count = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
    demo.service.unknown = Unknown()
    with caplog.at_level("WARNING", "outpace.server.schema"):
        same, *answers = (demo.answer(path, {**each, **count, "seed": 1}) for each in (without(body), body, body))
    used, text = same["usage"], [same.get(name) for name in ("choices", "content")]
    for answer in answers:
        assert [answer.get(name) for name in ("choices", "content")] == text
        names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
        total = [sum(usage.get(name, 0) for name in names) for usage in (used, answer["usage"])]
        assert total[0] == total[1]
    logged = [record.fields["field"] for record in caplog.records]  # type: ignore[attr-defined]
    assert len(logged) == len(set(logged)) > 0
    error = strict.answer(path, {**body, **count}, 400)["error"]
    assert param in error["message"]


@pytest.mark.parametrize("kind", ["input_audio", "file", "image_url", "video_url"])
def test_parts_that_are_no_text_are_refused_by_name(demo: Running, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:;base64,aGk="}}
    for path in ("/v1/chat/completions", "/v1/responses"):
        name = "input" if path == "/v1/responses" else "messages"
        error = demo.answer(path, {name: [{"role": "user", "content": [part]}]}, 400)["error"]
        assert error["param"] == f"{name}.0.content.0.type"
        assert f"{kind!r} is not supported" in error["message"]


def test_what_is_misspelt_is_refused(demo: Running) -> None:
    names = (("tempreature", "temperature"), ("MaxTokens", "max_tokens"), ("stop_token_id", "stop_token_ids"))
    for name, meant in names:
        error = demo.answer("/v1/completions", {**GOOD["/v1/completions"], "max_tokens": None, name: 1}, 400)["error"]
        assert (error["param"], f"did you mean {meant}?" in error["message"]) == (name, True)
    demo.answer("/v1/completions", {**GOOD["/v1/completions"], "model": "demo", "models": ["demo"]})
    many = {f"colour{i}": i for i in range(65)}
    assert "65 unknown" in demo.answer("/v1/completions", {**GOOD["/v1/completions"], **many}, 400)["error"]["message"]


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving(Engine.load("demo", drafter="none", max_length=512), strict_fields=True) as running:
        yield running


def test_a_body_of_mistakes_is_refused_at_its_first(demo: Running) -> None:
    """An error object for each of a million items took minutes and gigabytes."""
    for kind in (*PATHS.values(), MessagesRequest, OllamaChatRequest, OllamaGenerateRequest, EmbeddingsRequest):
        for name in kind.model_fields:
            wrong = json.dumps({name: [[1.5]] * 100, "messages": [{"role": 1, "content": [3] * 100}] * 100})
            with pytest.raises(ValidationError) as found:
                kind.model_validate_json(wrong, context=Unknown(refused=True))
            assert found.value.error_count() < 30


def test_bodies_are_bounded_and_json(demo: Running) -> None:
    path = "/v1/chat/completions"
    check(*post(demo, path, b" " * (9 << 20)), 413)
    for kind in ("text/plain", ""):
        check(*post(demo, path, b"{}", **{"content-type": kind}), 415)
    check(*post(demo, path, b"[" * 8000), 400)
    check(*post(demo, path, b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}"), 400)
    check(*post(demo, path, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400)
    check(*post(demo, path, b'{"messages": [{"role": "user", "content": "\xff"}]}'), 400)
    check(*post(demo, path, b'{"temperature": NaN, "messages": []}'), 400)
    check(*post(demo, "/v1/nothing", b"{}"), 404)
    check(*post(demo, "/health", b"{}"), 405)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


_LONG = {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of"}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_malformed_bodies_are_refused(demo: Running, data: st.DataObject) -> None:
    """A good body, some of its fields made something else, cut off, or renamed: answered or refused, never 5xx."""
    path = data.draw(st.sampled_from(sorted(PATHS)))
    fields = [*PATHS[path].model_fields, "unknown"]
    body = dict(GOOD[path])
    body |= data.draw(st.dictionaries(st.sampled_from(fields), _VALUES, min_size=1, max_size=3))
    for name in _LONG & {*body}:  # a valid request for thousands of tokens is another test's
        if body[name] is None or isinstance(body[name], int):
            del body[name]
    if body.get("stream") is True:
        body["stream"] = False
    body = {**{name: GOOD[path][name] for name in _LONG & {*GOOD[path]} if name not in body}, **body}
    sent = json.dumps(body).encode()
    if data.draw(st.booleans()):
        sent = sent[: data.draw(st.integers(0, len(sent)))]
    status, answer = post(demo, path, sent)
    if status != 200:
        check(status, answer)


def test_every_field_that_is_taken_is_described(demo: Running) -> None:
    document = demo.http.get("/openapi.json").json()
    for path, kind in PATHS.items():
        place = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        described = document["components"]["schemas"][place.rpartition("/")[2]]
        assert set(described["properties"]) == {field.alias or name for name, field in kind.model_fields.items()}
        assert described["additionalProperties"] is True
