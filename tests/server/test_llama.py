"""``/completion``: the same answers as ``/v1/completions``, as llama.cpp's clients ask for them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outpace.errors import ParameterError
from outpace.server.settings import ServerSettings
from tests.server.serving import Running

TEXT = "The capital of France is"
THEIRS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
ENDS = {"length": "limit", "stop": "eos"}


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({}, THEIRS),
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_k": -1, "repeat_penalty": 1.2, "repeat_last_n": 64}, {**THEIRS, "top_k": 0, "repetition_penalty": 1.2}),
        ({"logit_bias": [[7042, False], [1, 2.5]]}, {**THEIRS, "logit_bias": {"1": 2.5, "7042": -100}}),
        ({"json_schema": SCHEMA}, {
            **THEIRS, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        }),
        ({"grammar": 'root ::= "yes" | "no"'}, {**THEIRS, "guided_choice": ["yes", "no"]}),
        ({"samplers": ["top_k"], "mirostat": 0, "xtc_probability": 0, "cache_prompt": True, "typical_p": 1}, THEIRS),
        ({"n_probs": 2}, {**THEIRS, "logprobs": 2}),
    ],
)  # fmt: skip
def test_answers_are_those_of_completions(demo: Running, more: dict[str, Any], same: dict[str, Any]) -> None:
    theirs = demo.answer("/completion", {"prompt": TEXT, "n_predict": 12, "seed": 5, "return_tokens": True, **more})
    ours = demo.answer(
        "/v1/completions", {"prompt": TEXT, "max_tokens": 12, "seed": 5, "return_token_ids": True, **same}
    )
    (choice,) = ours["choices"]
    assert (theirs["content"], theirs["tokens"]) == (choice["text"], choice["token_ids"])
    assert theirs["stop_type"] == ENDS[choice["finish_reason"]]
    assert (theirs["stop"], theirs["tokens_predicted"]) == (True, ours["usage"]["completion_tokens"])
    assert theirs["timings"]["predicted_n"] == theirs["tokens_predicted"]
    if "n_probs" in more:
        found = theirs["completion_probabilities"]
        assert [each["logprob"] for each in found] == choice["logprobs"]["token_logprobs"]
        assert [each["id"] for each in found] == theirs["tokens"]
        assert all(len(each["top_logprobs"]) == 2 for each in found)


def test_streams_end_with_what_the_answer_cost(demo: Running) -> None:
    asked = {"prompt": TEXT, "n_predict": 24, "seed": 6, "stop": [" people"], "n_probs": 1}
    whole = demo.answer("/completions", {**asked, "return_tokens": True})
    response = demo.post("/completion", {**asked, "stream": True})
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert [each["stop"] for each in parts] == [False] * len(parts)
    assert "".join(each["content"] for each in parts) == whole["content"]
    assert [token for each in parts for token in each["tokens"]] == whole["tokens"]
    assert [each for part in parts for each in part["completion_probabilities"]] == whole["completion_probabilities"]
    for name in ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "generation_settings"):
        assert last[name] == whole[name]
    assert (whole["stop_type"], whole["stopping_word"]) == ("word", " people")


@pytest.mark.parametrize(
    ("path", "field", "limit", "begins"),  # begins: events before those of progress
    [
        ("/completion", "prompt", "n_predict", 0),
        ("/v1/completions", "prompt", "max_tokens", 0),
        ("/v1/chat/completions", "messages", "max_tokens", 0),
        ("/v1/messages", "messages", "max_tokens", 1),
        ("/v1/responses", "input", "max_output_tokens", 2),
    ],
)
def test_streams_say_how_much_of_the_prompt_was_read(
    demo: Running, path: str, field: str, limit: str, begins: int
) -> None:
    """While a prompt is read, and once it was; other events are those of a stream that says nothing of it."""
    text = path + " word" * 1200
    prompt = [{"role": "user", "content": text}] if field == "messages" else text
    body = {field: prompt, limit: 3, "seed": 1, "stream": True}
    found: list[Any] = []
    with demo.held() as reached, demo.http.stream("POST", path, json={**body, "return_progress": True}) as response:
        lines = response.iter_lines()
        assert reached.wait(60)  # a piece of the prompt was read, and no more is
        for line in lines:
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")).get("prompt_progress"))
                if found[-1] and found[-1]["processed"]:
                    break
        assert 0 < found[-1]["processed"] < found[-1]["total"]
    demo.at_rest()
    events = [event.get("prompt_progress") for event in demo.events(path, {**body, "return_progress": True})]
    shown = [event for event in events if event]
    assert shown == events[begins : begins + len(shown)]
    assert shown[-1]["processed"] == shown[-1]["total"]
    assert not any(event.get("prompt_progress") for event in demo.events(path, body))
    demo.at_rest()


CHAT = {"messages": [{"role": "user", "content": "Paint it."}], "seed": 3, "max_tokens": 40}


@pytest.mark.parametrize(
    ("more", "same"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, {"guided_choice": ["yes", "no"]}),
        ({"grammar": ""}, {}),
        ({"json_schema": SCHEMA}, {"guided_json": SCHEMA}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"guided_json": SCHEMA}),
        ({"max_tokens": None, "n_predict": 3}, {"max_tokens": 3}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"guided_json": SCHEMA}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"guided_json": SCHEMA}),
    ],
)
def test_chats_take_formats_as_llama_cpp_does(demo: Running, more: dict[str, Any], same: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    theirs, ours = (demo.answer(path, {**CHAT, **each})["choices"][0]["message"] for each in (more, same))
    assert theirs == ours


def test_routes_without_v1_and_with_a_slash_too_many(demo: Running) -> None:
    for path in ("/chat/completions", "/v1/chat/completions/", "//v1/chat/completions", "/v1/v1/chat/completions"):
        assert demo.answer(path, CHAT)["object"] == "chat.completion"
    assert demo.answer("/responses", {"input": "Hi", "max_output_tokens": 1})["object"] == "response"
    assert demo.answer("/messages", {"messages": CHAT["messages"], "max_tokens": 1})["type"] == "message"
    assert demo.answer("/messages", {"messages": []}, 400)["type"] == "error"
    assert demo.answer("/embeddings", {"input": "a"}, 400)["error"]["code"] == "unsupported_model"
    assert [each["id"] for each in demo.http.get("/models").json()["data"]] == ["demo"]
    assert demo.http.get("/models/demo/").json()["id"] == "demo"
    slots = demo.http.get("/slots").json()
    assert len(slots) == demo.http.get("/props").json()["total_slots"]
    assert {(each["n_ctx"], each["is_processing"]) for each in slots} == {(2048, False)}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"logit_bias": [["a", 1]] * 257}, "logit_bias"),
        ({"repeat_penalty": 1e9}, "repeat_penalty"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"n_probs": 10**6}, "n_probs"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(demo: Running, more: dict[str, Any], named: str) -> None:
    error = demo.answer("/completion", {"prompt": TEXT, **more}, 400)["error"]
    assert error["param"] == named, error


def test_several_prompts_have_a_list_of_answers(demo: Running) -> None:
    """Texts, token ids, both in one prompt, and objects: each is answered as by itself."""
    asked = {"n_predict": 6, "temperature": 0}
    ids = demo.answer("/tokenize", {"content": TEXT, "add_special": True})["tokens"]
    alone = demo.answer("/completion", {"prompt": TEXT, **asked})
    prompts = [
        TEXT,
        ids,
        {"prompt_string": TEXT},
        [*ids[:2], demo.answer("/detokenize", {"tokens": ids[2:]})["content"]],
    ]
    answers = demo.answer("/completion", {"prompt": prompts, **asked})
    assert [each["content"] for each in answers] == [alone["content"]] * 4
    assert [each["index"] for each in answers] == [0, 1, 2, 3]
    for field in ("prompt", "tokens_evaluated", "truncated", "has_new_line"):
        assert {each[field] for each in answers} == {alone[field]}
    events = demo.events("/completion", {"prompt": prompts, **asked})
    for i in range(4):
        assert "".join(each["content"] for each in events if each["index"] == i) == alone["content"]
    asked = {"prompt": TEXT, **asked, "response_fields": ["timings/predicted_n", "content"]}
    assert demo.answer("/completion", asked) == {"timings/predicted_n": 6, "content": alone["content"]}
    *parts, last = demo.events("/completion", asked)
    assert "".join(part["content"] for part in parts) == alone["content"]
    assert last == {"timings/predicted_n": 6, "content": ""}  # as in llama.cpp: the last alone is cut


def test_a_text_may_be_biased(demo: Running) -> None:
    """All tokens of it, as of their ids."""
    asked = {"prompt": TEXT, "n_predict": 6, "temperature": 0}
    ids = demo.answer("/tokenize", {"content": " Paris"})["tokens"]
    by_text, by_id, named = (
        demo.answer("/completion", {**asked, "logit_bias": each})["content"]
        for each in ([[" Paris", False]], [[token, False] for token in ids], {" Paris": -100})
    )
    assert by_text == by_id == named
    assert " Paris" in demo.answer("/completion", asked)["content"]
    assert " Paris" not in by_text
    digits = {"logit_bias": [["5", 1]], "response_fields": ["generation_settings/logit_bias"]}
    [text] = demo.answer("/tokenize", {"content": "5"})["tokens"]
    assert demo.answer("/completion", {**asked, **digits}) == {"generation_settings/logit_bias": {str(text): 1}}
    demo.answer("/completion", {**asked, "logit_bias": {"9" * 5000: 1}}, 400)


def test_pieces_of_a_text(demo: Running) -> None:
    text = "caf\u00e9 \U0001f917 <|im_start|>"
    plain, special = (
        demo.answer("/tokenize", {"content": text, "with_pieces": True, "parse_special": each})["tokens"]
        for each in (False, True)
    )
    for tokens in (plain, special):
        codes = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in tokens]
        assert b"".join(codes).decode() == text
        ids = [each["id"] for each in tokens]
        assert demo.answer("/detokenize", {"tokens": ids})["content"] == text
    assert any(isinstance(each["piece"], list) for each in plain)
    assert len(special) < len(plain)
    assert special[-1]["piece"] == "<|im_start|>"
    assert "content" in demo.answer("/tokenize", {"content": text, "prompt": text}, 400)["error"]["message"]


def test_too_long_a_prompt_is_named_as_there(demo: Running) -> None:
    long = [1] * 3000
    error = demo.answer("/completion", {"prompt": long}, 400)["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 3000, 2048)
    assert demo.answer("/v1/completions", {"prompt": long}, 400)["error"]["type"] == "invalid_request_error"


def test_timings(demo: Running) -> None:
    """Where they are asked for, with every chunk; what they count is what the usage has."""
    path, asked = "/v1/chat/completions", {**CHAT, "max_tokens": 9, "ignore_eos": True}
    streamed = {**asked, "timings_per_token": True, "stream_options": {"include_usage": True}}
    first, *chunks, last = demo.events(path, streamed)
    counts = [each["timings"]["predicted_n"] for each in chunks]
    assert "timings" not in first
    assert counts == sorted(counts)
    usage, timings = last["usage"], last["timings"]
    assert (timings["predicted_n"], timings["cache_n"]) == (9, usage["prompt_tokens_details"]["cached_tokens"])
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_per_second"] == pytest.approx(8e3 / timings["predicted_ms"])
    assert demo.answer(path, {**asked, "timings_per_token": True})["timings"]["predicted_n"] == 9
    assert "timings" not in demo.answer(path, asked)
    once = demo.answer("/completion", {"prompt": TEXT, "n_predict": 1})["timings"]
    assert (once["predicted_n"], once["predicted_per_second"]) == (1, 0)


def test_tokens_of_an_input_are_counted(demo: Running) -> None:
    usage = demo.answer("/v1/chat/completions", {**CHAT, "max_tokens": 1})["usage"]
    asked = {"messages": CHAT["messages"]}
    for path, body in (
        ("/chat/completions/input_tokens", asked),
        ("/v1/responses/input_tokens", {"input": CHAT["messages"]}),
        ("/v1/messages/count_tokens", asked),
    ):
        assert demo.answer(path, body)["input_tokens"] == usage["prompt_tokens"]


def test_defaults_are_what_requests_do_not_say(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("temperature=0", "max_tokens=5", "repetition_penalty=1.3", 'stop=["zz"]')
    said = {"temperature": 0, "max_tokens": 5, "repetition_penalty": 1.3, "seed": 1}
    chat, text = {"messages": CHAT["messages"]}, {"prompt": TEXT}
    wanted = [
        demo.answer(f"/v1/{path}", {**body, **said})
        for path, body in (("chat/completions", chat), ("completions", text))
    ]
    monkeypatch.setattr(demo.service, "settings", replace(demo.service.settings, defaults=given))
    found = [demo.answer(f"/v1/{path}", body) for path, body in (("chat/completions", chat), ("completions", text))]
    assert found[0]["choices"][0]["message"] == wanted[0]["choices"][0]["message"]
    assert found[1]["choices"][0]["text"] == wanted[1]["choices"][0]["text"]
    theirs = demo.answer("/completion", text)
    assert theirs["content"] == found[1]["choices"][0]["text"]
    settings = theirs["generation_settings"]
    assert (settings["n_predict"], settings["temperature"], settings["top_k"], settings["stop"]) == (5, 0, 40, ["zz"])
    assert demo.answer("/v1/completions", {**text, "max_tokens": 2})["usage"]["completion_tokens"] == 2
    params = demo.http.get("/props").json()["default_generation_settings"]["params"]
    assert (params["n_predict"], params["temperature"], params["repeat_penalty"]) == (5, 0, 1.3)
    own = {**chat, "repeat_penalty": 1.0}
    plain = demo.answer("/v1/chat/completions", own)["choices"][0]["message"]
    assert plain == demo.answer("/v1/chat/completions", {**chat, "repetition_penalty": 1.0})["choices"][0]["message"]
    assert plain != found[0]["choices"][0]["message"]
    for all_that_fit in ("-1", "null"):
        settings = replace(demo.service.settings, defaults=(f"max_tokens={all_that_fit}",))
        monkeypatch.setattr(demo.service, "settings", settings)
        assert demo.http.get("/props").json()["default_generation_settings"]["params"]["n_predict"] == -1


@pytest.mark.parametrize("given", ["temprature=1", "temperature=hot", "top_p=2", "rules=[]", 'logit_bias={"1": 2}'])
def test_wrong_defaults_are_refused(given: str) -> None:
    with pytest.raises(ParameterError, match=given.partition("=")[0]):
        ServerSettings(defaults=(given,))
