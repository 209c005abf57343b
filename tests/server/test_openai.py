"""The official client: whatever it returns can be sent back, and every field that it knows is taken or refused by name;
what vLLM's and llama.cpp's clients send beside them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Literal, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from outpace.server.api.chat import ChatRequest
from outpace.server.api.completions import CompletionRequest
from outpace.server.api.prompt import rendered
from outpace.server.api.responses import ResponsesRequest
from outpace.server.conversation.control import ControlTokens
from outpace.server.errors import APIError
from outpace.server.fields import FIELDS
from outpace.server.schema import Body
from outpace.text.chat_template import ChatTemplate
from tests.server.formats import QWEN3
from tests.server.serving import Running

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Paint it."}]
COLOUR = {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip
PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": COLOUR, "strict": True}}


class Painted(BaseModel):
    colour: Literal["red", "blue"]


def together(total: dict[str, Any], delta: dict[str, Any]) -> None:
    """Raw deltas put together, as clients do: texts joined, lists by index, the rest kept."""
    for name, value in delta.items():
        if isinstance(value, str) and isinstance(total.get(name), str) and name not in ("id", "type", "role"):
            total[name] += value
        elif isinstance(value, list):
            its = total[name] = total.get(name) or []
            for entry in value:
                its += [{} for _ in range(entry["index"] + 1 - len(its))]
                together(its[entry["index"]], entry)
        elif isinstance(value, dict):
            together(total.setdefault(name, {}), value)
        elif value is not None or name not in total:
            total[name] = value


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the client's own, of what it parsed
def test_messages_go_back_as_the_client_gave_them(demo: Running) -> None:
    client: Any = demo.client()
    asked: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 40, "seed": 1}
    called = {**asked, "tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
    formed = {**asked, "response_format": Painted}
    found = [
        *(client.chat.completions.create(**its).choices[0].message for its in (asked, called)),
        *(client.chat.completions.parse(**its).choices[0].message for its in (called, formed)),
    ]
    for its in (called, formed):
        with client.chat.completions.stream(**its) as stream:
            found.append(stream.get_final_completion().choices[0].message)
    for its in (asked, called):
        message: dict[str, Any] = {}
        for chunk in client.chat.completions.create(**its, stream=True):
            together(message, chunk.choices[0].delta.model_dump())
        found.append(message)
    assert sum(bool(dict(message).get("tool_calls")) for message in found) == 4
    assert all(isinstance(found[i].parsed, Painted) for i in (3, 5))
    for message in found:
        for form in (message, message if isinstance(message, dict) else message.model_dump()):
            calls = dict(form).get("tool_calls") or ()
            results = [
                {"role": "tool", "tool_call_id": dict(call)["id"], "content": [{"type": "text", "text": "done"}]}
                for call in calls
            ]
            back = [*ASK, form, *results, *ASK]
            answer = client.chat.completions.create(model="demo", messages=back, max_tokens=2, tools=[PAINT])
            assert answer.usage.completion_tokens
    demo.at_rest()


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the client's own, of what it parsed
def test_items_go_back_as_the_client_gave_them(demo: Running) -> None:
    client: Any = demo.client()
    tool = {"type": "function", **PAINT["function"]}
    asked: dict[str, Any] = {"model": "demo", "input": ASK, "max_output_tokens": 40, "extra_body": {"seed": 1}}
    called = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    formed = {**asked, "text_format": Painted, "reasoning": {"effort": "none", "summary": "auto"}}
    found = [client.responses.create(**called), client.responses.parse(**called), client.responses.parse(**formed)]
    with client.responses.stream(**formed) as stream:
        found.append(stream.get_final_response())
    for response in found:
        for form in (response.output, [item.model_dump() for item in response.output]):
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": [
                    {"type": "input_text", "text": "done"},
                ]} for item in response.output if item.type == "function_call"
            ]  # fmt: skip
            back = [*ASK, *form, *results, *ASK]
            assert client.responses.create(model="demo", input=back, max_output_tokens=2, tools=[tool]).output
    demo.at_rest()


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_the_client_is_known(kind: type[Body], params: Any) -> None:
    assert not set(get_type_hints(params)) - set(kind.model_fields) - set(FIELDS)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_nulls_are_ignored_wherever_they_stand(demo: Running, path: str) -> None:
    nothing = {"anything": None, "functions": None}
    part = {"type": "text" if path == CHAT else "input_text", "text": "Hi", **nothing}
    body: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": [part], **nothing}], "tools": [{**PAINT, **nothing}]},
        "/v1/completions": {"prompt": "Hi", "response_format": {"type": "text", **nothing}},
        "/v1/responses": {"input": [{"role": "user", "content": [part], **nothing}], "text": nothing},
    }[path]
    assert demo.answer(path, {**body, "seed": 1, **nothing, "deadline": 0.05})["usage"]


def said(demo: Running, **more: Any) -> str:
    body = {"messages": ASK, "max_tokens": 24, "temperature": 0, "seed": 1, **more}
    text: str = demo.answer(CHAT, body)["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"guided_choice": ["röt", 'b"l|ue']}, r'röt|b"l\|ue'),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"guided_grammar": 'start: "x" | "y"'}, "x|y"),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"', "json": None}}, "x|y"),
        ({"guided_grammar": 'root ::= "x" | more\nmore ::= [y-z]{2}'}, "x|[yz]{2}"),
        ({"guided_json": COLOUR}, r'\{"colour": "(red|blue)"\}'),
        ({"structured_outputs": {"json": json.dumps(COLOUR)}}, r'\{"colour": "(red|blue)"\}'),
        ({"structured_outputs": {"json_object": True}}, r"\{(.|\n)*"),
    ],
)
def test_formats_as_vllm_spells_them(demo: Running, more: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, said(demo, **more))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guided_choice": ["a"], "grammar": {"type": "regex", "value": "a"}}, "guided_choice"),
        ({"structured_outputs": {"regex": "(", "choice": None}}, "structured_outputs.regex"),
        ({"guided_grammar": "root ::= gone"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"continue_final_message": True}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_they_ask_wrongly_is_named(demo: Running, more: dict[str, Any], param: str) -> None:
    assert demo.answer(CHAT, {"messages": ASK, **more}, 400)["error"]["param"] == param


def test_no_bound_is_what_the_context_holds(demo: Running) -> None:
    short: dict[str, Any] = {"grammar": {"type": "regex", "value": "a{20}"}, "temperature": 0}
    for path, body in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "Hi"})):
        assert demo.answer(path, {**body, **short, "max_tokens": -1})["usage"]["completion_tokens"] > 2


def test_an_answer_goes_on_with_the_last_message(demo: Running) -> None:
    """As if the model had written it so far: the prompt ends with it, and with no mark of its end."""
    talk = [*ASK, {"role": "assistant", "content": "Red, blue and "}]
    asked = {"messages": talk, "continue_final_message": True}
    tokens = demo.answer("/tokenize", {**asked, "add_generation_prompt": False})["tokens"]
    assert demo.answer("/detokenize", {"tokens": tokens})["prompt"].endswith("Red, blue and ")
    answer = demo.answer(CHAT, {**asked, "return_token_ids": True, "max_tokens": 4})
    assert answer["prompt_token_ids"] == tokens


@pytest.mark.parametrize("thinks", [True, False])
def test_effort_is_what_the_template_knows(thinks: bool) -> None:
    tokenizer: Any = SimpleNamespace(
        chat_template_of=lambda tools: QWEN3, render_chat=ChatTemplate(QWEN3, {}).render, special_ids=()
    )  # fmt: skip
    model: Any = SimpleNamespace(
        tokenizer=tokenizer, control=ControlTokens(tokenizer, allowed=True), most_text=10_000
    )  # fmt: skip
    body = ChatRequest.model_validate({"messages": ASK, "reasoning_effort": "low" if thinks else "none"})
    assert ("</think>" in rendered(body, body.messages, [], "none", model)) is not thinks
    twice = body.model_copy(update={"chat_template_kwargs": {"enable_thinking": thinks}})
    with pytest.raises(APIError, match="say the same"):
        rendered(twice, body.messages, [], "none", model)
    source = QWEN3 + "{{ reasoning_effort }}"
    tokenizer.chat_template_of, tokenizer.render_chat = lambda tools: source, ChatTemplate(source, {}).render
    assert rendered(body, body.messages, [], "none", model).endswith("low" if thinks else "none")


def test_switches_that_the_template_does_not_know_change_nothing_and_are_noted(demo: Running) -> None:
    body = {"messages": ASK, "max_tokens": 4, "seed": 1}
    switches = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}
    plain, switched = (demo.answer(CHAT, {**body, **more}) for more in ({}, switches))
    assert plain["choices"] == switched["choices"]
    assert plain["usage"]["prompt_tokens"] == switched["usage"]["prompt_tokens"]
    assert demo.answer(CHAT, {**body, "reasoning_effort": "none"})["usage"]["speculation"]["notes"] == []
    names = [note.partition(" ")[0] for note in switched["usage"]["speculation"]["notes"]]
    assert names == ["chat_template_kwargs.enable_thinking", "reasoning_effort"]
    assert demo.answer(CHAT, {**body, "chat_template_kwargs": [1]}, 400)["error"]["param"] == "chat_template_kwargs"


def test_tools_beside_a_format(demo: Running) -> None:
    """An answer is a call or in the format, and nothing else."""
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}}
    for seed in range(4):
        body = {"messages": ASK, "tools": [PAINT], "response_format": schema, "seed": seed, "temperature": 1.5}
        message = demo.answer(CHAT, {**body, "max_tokens": 60})["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        for text in [call["function"]["arguments"] for call in calls] or [message["content"]]:
            assert Painted.model_validate_json(text)
    body["tool_choice"] = "required"
    assert demo.answer(CHAT, body)["choices"][0]["message"]["tool_calls"]
    body["tool_choice"] = "none"
    assert Painted.model_validate_json(demo.answer(CHAT, body)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_drafts_are_reported_as_aiperf_reads_them(demo: Running, path: str) -> None:
    """Once in an answer, where there is one choice; its counts agree with one another."""
    text = "one two three, one two three, one two three, one two three,"
    body: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "speculation": {"size": 3}, "ignore_eos": True}
    body |= {"prompt": text} if path != CHAT else {"messages": [{"role": "user", "content": f"Repeat: {text}"}]}
    whole = demo.answer(path, body)
    *_, last = chunks = demo.events(path, {**body, "stream_options": {"include_usage": True}})
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for answer in (whole, last):
        its, usage = answer["metrics"]["speculative_decoding"], answer["usage"]
        counts = its["acceptance_histogram"]
        assert sum(counts) == its["num_spec_steps"] > 0
        assert sum(n * steps for n, steps in enumerate(counts)) == its["num_accepted_draft_tokens"] > 0
        assert its["num_accepted_draft_tokens"] <= its["num_draft_tokens"] == usage["speculation"]["drafted"]
        assert its["draft_acceptance_rate"] == its["num_accepted_draft_tokens"] / its["num_draft_tokens"]
        assert its["mean_acceptance_length"] == 1 + its["num_accepted_draft_tokens"] / its["num_spec_steps"]
    assert "metrics" not in demo.answer(path, {**body, "n": 2})
    assert "metrics" not in demo.answer(path, {**body, "speculation": {"off": True}})


def test_prompts_get_the_same_alone_and_as_a_list(demo: Running) -> None:
    """As vLLM tests its batch-invariant mode over HTTP: 32 prompts one by one and in one request, to the bit."""
    prompts = [f"{subject} {i}: the first thing to know is" for i in range(8) for subject in ("A", "On", "Two", "My")]
    shared = {"max_tokens": 8, "temperature": 0.6, "top_p": 1.0, "seed": 42, "logprobs": 5}

    def asked(prompt: str | list[str]) -> list[tuple[Any, ...]]:
        choices = demo.answer("/v1/completions", {**shared, "prompt": prompt})["choices"]
        return [(its["text"], its["logprobs"], its["finish_reason"]) for its in choices]

    together = asked(prompts)
    assert [asked(prompt)[0] for prompt in prompts] == together
    with ThreadPoolExecutor(8) as threads:
        assert [found for (found,) in threads.map(asked, prompts)] == together
    demo.at_rest()


def test_what_llama_cpps_page_asks(demo: Running) -> None:
    props = demo.http.get("/props").json()
    model = demo.http.get("/v1/models").json()["data"][0]
    assert props["default_generation_settings"]["n_ctx"] == model["max_model_len"]
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "{%" in props["chat_template"]
    prompt = demo.answer("/apply-template", {"messages": ASK})["prompt"]
    tokens = demo.answer("/tokenize", {"messages": ASK})["tokens"]
    assert demo.answer("/detokenize", {"tokens": tokens})["prompt"] == prompt
    page = {"stream": True, "return_progress": True, "reasoning_format": "auto", "timings_per_token": True}
    page |= {"backend_sampling": False, "max_tokens": -1, "tools": None, "deadline": 0.05}
    assert demo.events(CHAT, {"messages": ASK, **page})[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"messages": ASK, "logprobs": True}),
        (CHAT, {"messages": ASK, "tools": [PAINT], "tool_choice": "required", "n": 2}),
        ("/v1/completions", {"prompt": ["One two", "Three"], "echo": True, "logprobs": 0}),
        ("/v1/completions", {"prompt": "One two", "echo": True, "max_tokens": 0}),
    ],
)
def test_why_a_choice_ended_comes_after_its_words(demo: Running, path: str, more: dict[str, Any]) -> None:
    """And each chunk says what was used so far, where that is asked for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"max_tokens": 12, "seed": 4, "return_token_ids": True, "stream_options": options, **more}
    *events, last = demo.events(path, asked)
    count, ended = 0, set()
    for event in events:
        (choice,) = event["choices"]
        words = choice.get("delta", choice.get("text"))
        assert choice["index"] not in ended
        count += len(choice.get("token_ids", []))
        usage = {**event["usage"]}
        assert usage == {
            "prompt_tokens": last["usage"]["prompt_tokens"], "completion_tokens": count,
            "total_tokens": last["usage"]["prompt_tokens"] + count,
        }  # fmt: skip
        if choice["finish_reason"] is not None:
            ended.add(choice["index"])
            assert (words or None, choice["logprobs"]) == (None, None)
    assert len(ended) == len(demo.answer(path, {**asked, "stream_options": None})["choices"])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], count)
    del options["continuous_usage_stats"]
    assert {str(event["usage"]) for event in demo.events(path, asked)[:-1]} == {"None"}


def test_prompts_have_log_probabilities(demo: Running) -> None:
    """As vLLM names them, in chats and completions: those that an echoed prompt has."""
    asked = {"max_tokens": 4, "seed": 2}
    chat = demo.answer(CHAT, {"messages": ASK, **asked, "prompt_logprobs": 2, "return_token_ids": True})
    ids = chat["prompt_token_ids"]
    text = demo.answer("/v1/completions", {"prompt": ids, **asked, "echo": True, "logprobs": 2, "prompt_logprobs": 1})
    choice = text["choices"][0]
    assert [
        found and found[str(token)]["logprob"] for token, found in zip(ids, chat["prompt_logprobs"], strict=True)
    ] == (choice["logprobs"]["token_logprobs"][: len(ids)])
    assert chat["prompt_logprobs"][0] is choice["prompt_logprobs"][0] is None
    for token, found, one in zip(ids[1:], chat["prompt_logprobs"][1:], choice["prompt_logprobs"][1:], strict=True):
        ranks = {each["rank"]: each["logprob"] for each in found.values() if each["rank"]}
        assert (sorted(ranks), ranks[1] > ranks[2]) == ([1, 2], True)
        assert len(found) == 2 + (found[str(token)]["rank"] is None)
        assert one.items() <= {**found, str(token): {**found[str(token)], **one[str(token)]}}.items()
        assert found[str(token)]["decoded_token"] == demo.answer("/detokenize", {"tokens": [token]})["content"]
    assert "prompt_logprobs" not in demo.answer(CHAT, {"messages": ASK, **asked})
    for path, prompt in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "a"})):
        resumed = {"prompt_logprobs": 0, "resume": {"token_ids": [5]}, "seed": 1}
        for more in ({"prompt_logprobs": 0, "stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}, resumed):
            assert demo.answer(path, {**prompt, **more}, 400)["error"]["param"] == "prompt_logprobs"


def test_what_vllms_clients_ask_of_a_tokenizer(demo: Running) -> None:
    info = demo.http.get("/tokenizer_info").json()
    assert info["model_max_length"] == 2048
    assert info["chat_template"] == demo.http.get("/props").json()["chat_template"]
    (end,) = demo.answer("/tokenize", {"content": info["eos_token"]})["tokens"]
    assert info["added_tokens_decoder"][str(end)] == {"content": "<|im_end|>", "special": True}


def test_embeddings_are_refused_by_name(demo: Running) -> None:
    error = demo.answer("/v1/embeddings", {"input": "x", "model": "demo"}, 400)["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported_model")
    assert "'demo' writes text" in error["message"]


def test_a_seed_of_minus_one_is_drawn(demo: Running) -> None:
    """As in llama.cpp and vLLM; the answer names it."""
    seeds = {
        demo.answer(CHAT, {"messages": ASK, "max_tokens": 1, "seed": -1, "return_token_ids": True})["seed"]
        for _ in range(3)
    }
    assert len(seeds) == 3
    assert all(0 <= seed < 2**53 for seed in seeds)
