"""What the server says is what ``Engine.generate`` says, bit for bit: parameters in combination, alone and 16 at once,
drafted and plain, streamed and not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outpace import Engine, Grammars, SamplingParams
from outpace.engine.results import Result
from tests.server.serving import Running

CHAT = "/v1/chat/completions"
PROMPTS = ["Count to ten, twice.", "Write one line about rivers.", "Repeat: red, green, blue, red, green, blue, red,"]
LOGPROBS = {"logprobs": True, "top_logprobs": 3}
ASKED: list[dict[str, Any]] = [  # as a request spells it
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, **LOGPROBS},
    {"temperature": 1.3, "top_k": 20, "presence_penalty": 0.5, "frequency_penalty": 0.3, **LOGPROBS},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"198": 2.5, "30": -100}, **LOGPROBS},
    {"temperature": 0.7, "min_p": 0.1, "logit_bias": {"28": 3}, "stop": [",", "\n\n"], "min_tokens": 4, **LOGPROBS},
    {"temperature": 0.9, "n": 3, "top_p": 0.8, "bad_words": ["the"], **LOGPROBS},
    {"temperature": 0, "stop": ["green"], "include_stop_str_in_output": True, "logprobs": True},
    {"temperature": 0.6, "stop_token_ids": [30, 28], "ignore_eos": True, "skip_special_tokens": False},
    {"temperature": 1, "seed": -2, "frequency_penalty": -0.4, "max_completion_tokens": 9},
]
EACH: dict[str, list[Any]] = {  # what may go with anything else
    "temperature": [0, 0.7, 1.3], "top_p": [0.9], "top_k": [30], "min_p": [0.03], "top_n_sigma": [2.5],
    "presence_penalty": [0.6],
    "frequency_penalty": [-0.3], "repetition_penalty": [1.2], "logit_bias": [{"28": 2, "198": -3}],
    "stop": [[",", "e "]], "stop_token_ids": [[30, 4]], "min_tokens": [3], "bad_words": [["the", "River"]],
    "allowed_token_ids": [list(range(0, 40_000, 2))], "ignore_eos": [True], "include_stop_str_in_output": [True],
    "skip_special_tokens": [False], "n": [2], "top_logprobs": [2], "grammar": ["[ -~]{9,}"],
    "speculation": [{"off": True}, {"size": 2}, {"drafter": "ngram+suffix", "size": 5}],
}  # fmt: skip
_OURS = {
    "include_stop_str_in_output": "include_stop",
    "stop_token_ids": "stop_ids",
    "allowed_token_ids": "allowed_tokens",
    "max_completion_tokens": "max_tokens",
}


def body(i: int) -> dict[str, Any]:
    """Request i."""
    asked = {"seed": 100 + i, **ASKED[i % len(ASKED)]}
    return asked if "max_completion_tokens" in asked else {"max_tokens": 10, **asked}


def params(i: int) -> SamplingParams:
    own = {_OURS.get(name, name): value for name, value in body(i).items()}
    own["logit_bias"] = {int(token): bias for token, bias in own.get("logit_bias", {}).items()}
    return SamplingParams(**{**own, "seed": own["seed"] % 2**64})


def messages(i: int) -> list[Any]:
    return [{"role": "user", "content": PROMPTS[i % len(PROMPTS)]}]


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[Result]]:
    """Plain decoding, one request after the other, of twice as many requests as there are combinations."""
    return [plain.generate_many([messages(i)], params(i)) for i in range(2 * len(ASKED))]


def ask(demo: Running, i: int, **more: Any) -> list[Any]:
    """The choices of request i, as the wire has them."""
    sent = {**body(i), "messages": messages(i), "return_token_ids": True, **more}
    choices: list[Any] = demo.answer(CHAT, sent)["choices"]
    return choices


def collected(demo: Running, i: int) -> list[Any]:
    """The same of a stream, put together."""
    choices: dict[int, Any] = {}
    for chunk in demo.events(CHAT, {**body(i), "messages": messages(i), "return_token_ids": True}):
        for part in chunk["choices"]:
            its = choices.setdefault(part["index"], {"message": {"content": ""}, "logprobs": None, "token_ids": []})
            its["message"]["content"] += part["delta"].get("content", "")
            its["token_ids"] += part.get("token_ids", [])
            if part["logprobs"] is not None:
                its["logprobs"] = its["logprobs"] or {"content": []}
                its["logprobs"]["content"] += part["logprobs"]["content"]
            its["finish_reason"], its["stop_reason"] = part["finish_reason"], part.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def check(choices: list[Any], results: list[Result]) -> None:
    assert len(choices) == len(results)
    for choice, result in zip(choices, results, strict=True):
        assert choice["token_ids"] == list(result.token_ids)
        assert choice["message"]["content"] == result.text
        assert choice["finish_reason"] == result.finish_reason
        assert choice["stop_reason"] == result.stopped_by
        told = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
        assert [its["logprob"] for its in told] == [its.logprob for its in result.logprobs]
        assert [its["token"] for its in told] == [its.text for its in result.logprobs]
        for its, entry in zip(told, result.logprobs, strict=True):
            assert [(t["token"], t["logprob"]) for t in its["top_logprobs"]] == [(t.text, t.logprob) for t in entry.top]
            assert its["logprob"] < 0  # the target's own, not the 0 of a token that was drafted


@pytest.mark.parametrize("i", range(len(ASKED)))
def test_one_at_a_time(demo: Running, expected: list[list[Result]], i: int) -> None:
    check(ask(demo, i), expected[i])
    check(ask(demo, i, speculation={"off": True}), expected[i])


def test_sixteen_at_once_streamed_and_not(demo: Running, expected: list[list[Result]]) -> None:
    with ThreadPoolExecutor(16) as threads:
        whole = [threads.submit(ask, demo, i) for i in range(len(expected))]
        streamed = [threads.submit(collected, demo, i) for i in range(len(expected))]
        for asked in (whole, streamed):
            for future, results in zip(asked, expected, strict=True):
                check(future.result(120), results)
    demo.at_rest()


def test_any_parameters_together(demo: Running, plain: Engine) -> None:
    """Every two of them meet in some of these requests, which are all there at once."""
    chance, grammars = random.Random(12), Grammars.of(plain)
    asked = [
        {name: chance.choice(each) for name, each in EACH.items() if chance.random() < 0.6} | {"seed": i}
        for i in range(18)
    ]
    assert all(any(a in its and b in its for its in asked) for a in EACH for b in EACH)

    def expected(its: dict[str, Any], i: int) -> list[Result]:
        own = {_OURS.get(name, name): value for name, value in its.items() if name not in ("grammar", "speculation")}
        own["logit_bias"] = {int(token): bias for token, bias in own.get("logit_bias", {}).items()}
        own["rules"] = [grammars.regex(its["grammar"])] if "grammar" in its else []
        own["temperature"] = its.get("temperature", 1)
        return plain.generate_many([messages(i)], SamplingParams(**own, max_tokens=8))

    def wire(its: dict[str, Any], i: int) -> Any:
        sent = {**its, "messages": messages(i), "max_tokens": 8, "return_token_ids": True}
        if "grammar" in its:
            sent["grammar"] = {"type": "regex", "value": its["grammar"]}
        if "top_logprobs" in its:
            sent["logprobs"] = True
        return demo.answer(CHAT, sent)["choices"]

    with ThreadPoolExecutor(18) as threads:
        answers = [threads.submit(wire, its, i) for i, its in enumerate(asked)]
        for i, its in enumerate(asked):
            check(answers[i].result(), expected(its, i))
    demo.at_rest()


def test_answers_say_what_speculation_did(demo: Running) -> None:
    """Whole, in the last event of a stream, and in its usage; with the reason where it was off."""
    talk = [{"role": "user", "content": "Repeat after me: one two three, one two three, one two three, one two three."}]

    def told(wish: dict[str, Any]) -> tuple[dict[str, Any], int]:
        sent = {"messages": talk, "max_tokens": 32, "temperature": 0, "speculation": wish, "ignore_eos": True}
        whole = demo.answer(CHAT, sent)["usage"]
        *_, last, usage = demo.events(CHAT, {**sent, "stream_options": {"include_usage": True}})
        streamed = last["speculation"]
        assert streamed == usage["usage"]["speculation"]
        assert streamed.keys() == whole["speculation"].keys()
        for its in (streamed, whole["speculation"]):
            assert its["tokens_per_step"] * its["steps"] == pytest.approx(whole["completion_tokens"])
        return streamed, whole["completion_tokens"]

    its, tokens = told({"size": 3, "drafter": "ngram+suffix"})
    assert (its["drafter"], its["acceptance"]) == ("ngram+suffix", "coupled")
    assert 0 < its["accepted"] <= its["drafted"] <= 3 * its["steps"]
    assert its["steps"] == tokens - its["accepted"]
    its, tokens = told({"off": True})
    assert (its["drafter"], its["steps"], its["drafted"], its["accepted"]) == ("none", tokens, 0, 0)
    assert "plain decoding was asked for" in its["off_because"]


def test_the_same_when_the_prompt_comes_as_token_ids(demo: Running, plain: Engine) -> None:
    """Completions: several prompts at once, as text and as ids; echo says the prompt first, and how likely it was."""
    tokens = [demo.engine.engine.encode(messages(i)).tolist() for i in (0, 1)]
    answer = demo.client().completions.create(model="demo", prompt=tokens, max_tokens=12, temperature=0, logprobs=0)
    alone = plain.generate_many(tokens, SamplingParams(max_tokens=12, logprobs=True))
    raw = plain.generate(
        "One two three", SamplingParams(max_tokens=5, logprobs=True, top_logprobs=2, prompt_logprobs=2), raw=True
    )
    assert [choice.text for choice in answer.choices] == [result.text for result in alone]
    assert [choice.logprobs and choice.logprobs.token_logprobs for choice in answer.choices] == [
        [its.logprob for its in result.logprobs] for result in alone
    ]
    client = demo.client()
    asked: Any = {"model": "demo", "prompt": "One two three", "temperature": 0, "logprobs": 2, "echo": True}
    echoed = client.completions.create(**asked, max_tokens=5).choices[0]
    assert echoed.text == "One two three" + raw.text
    every = [None, *(its.logprob for its in raw.prompt_logprobs if its), *(its.logprob for its in raw.logprobs)]
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs == every
    assert echoed.logprobs.text_offset is not None
    offsets, words = echoed.logprobs.text_offset, echoed.logprobs.tokens or []
    assert [echoed.text[at : at + len(word)] for at, word in zip(offsets, words, strict=True)] == words
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, max_tokens=5, stream=True)]
    assert "".join(part.text for part in parts) == echoed.text
    assert [p for part in parts if part.logprobs for p in part.logprobs.token_logprobs or ()] == every
    assert [at for part in parts if part.logprobs for at in part.logprobs.text_offset or ()] == offsets
    scored = client.completions.create(**asked, max_tokens=0)
    assert scored.choices[0].text == "One two three"
    assert scored.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs == every[: len(raw.prompt_logprobs)]
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0


def test_formats_and_tools_are_the_same_drafted_and_plain(demo: Running) -> None:
    colours = {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3}
    schema = {
        "type": "object", "properties": {"colours": colours}, "required": ["colours"], "additionalProperties": False
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "paint", "parameters": schema}}
    asked: Any = {"model": "demo", "messages": messages(0), "max_tokens": 16, "seed": 3, "temperature": 0.8}

    def told(more: dict[str, Any], wish: dict[str, Any]) -> Any:
        answer = demo.client().chat.completions.create(**asked, extra_body={**more, "speculation": wish})
        chunks = demo.client().chat.completions.create(
            **asked, stream=True, extra_body={**more, "speculation": {**wish, "trace": True}}
        )
        message = answer.choices[0].message.to_dict()
        content, calls, written = "", {}, ""
        for chunk in chunks:
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for call in delta.tool_calls or ():
                its = calls.setdefault(call.index, [call.id, "", ""])
                its[1] += (call.function and call.function.name) or ""
                its[2] += (call.function and call.function.arguments) or ""
            its_part = chunk.to_dict().get("speculation")
            if isinstance(its_part, dict):
                written += "".join(its_part.get("texts", []))
        assert content == (message["content"] or "")
        assert [its for _, its in sorted(calls.items())] == [
            [c["id"], c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])
        ]
        if not calls:
            assert written == content
        return message, answer.choices[0].finish_reason

    wanted: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}},
        {"response_format": {"type": "json_object"}},
        {"grammar": {"type": "regex", "value": "(red|blue)( (red|blue)){3}"}},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool]},
    ]
    with ThreadPoolExecutor(2 * len(wanted)) as threads:
        drafted = [threads.submit(told, more, {"size": 3}) for more in wanted]
        plainly = [threads.submit(told, more, {"off": True}) for more in wanted]
        for one, other in zip(drafted, plainly, strict=True):
            assert one.result(120) == other.result(120)
    demo.at_rest()
