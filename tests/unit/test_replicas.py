"""Which replica a request goes to, and what of a stream another server is asked to go on with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outpace.integrations.ray.delivered import Delivered, DeliveredEvents, LostError
from outpace.integrations.ray.routing import Routes, beginnings


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user" if i % 2 else "system", "content": text} for i, text in enumerate(texts)]}


def test_prompts_that_begin_alike_go_to_one_replica_until_it_has_its_share() -> None:
    routes, load = Routes(), {"a": 0, "b": 0, "c": 0}
    first = routes.choose(beginnings(chat("You are a poet.", "Hi")), load)
    assert first is not None
    assert {routes.choose(beginnings(chat("You are a poet.", str(i))), load) for i in range(20)} == {first}
    assert len({routes.choose(beginnings(chat(f"You are {i}.", "Hi")), load) for i in range(50)}) == 3
    turn = beginnings(chat("You are a poet.", "Hi", "Ho", "Go on"))
    other = routes.choose(turn, {**load, first: 50})
    assert other not in (None, first)
    assert routes.choose(beginnings(chat("You are a poet.", "Hi", "Ho", "Go on", "Well", "More")), load) == other
    assert routes.choose(turn, load, avoid=["a", "b", "c"]) is None


def test_what_has_no_prompt_goes_where_least_runs() -> None:
    assert beginnings(None) == beginnings({"model": "x"}) == []
    assert Routes().choose([], {"a": 3, "b": 1}) == "b"


def chunk(text: str, ids: list[int], finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "finish_reason": finish, "delta": {"content": text}, "token_ids": ids}
    head = {"id": "one", "created": 1, "system_fingerprint": "fp", "seed": 3}
    return b"data: " + json.dumps({**head, "choices": [choice], **more}).encode() + b"\n\n"


def test_another_server_is_asked_to_go_on_after_what_came_and_nothing_comes_twice() -> None:
    body = {**chat("Hi"), "seed": 3, "n": 2, "stream": True}
    stream = Delivered(body)
    assert "resume" not in stream.request()
    assert stream.request()["return_token_ids"] is True
    seen = json.loads(stream.take(chunk("a", [1, 2]))[6:])
    assert "seed" not in seen
    assert "token_ids" not in seen["choices"][0]
    stream.take(chunk("b", [7], "stop", index=1))
    assert stream.request()["resume"] == {"token_ids": [[1, 2], [7]]}
    assert stream.take(chunk("", [], "stop", index=1)) == b""
    later = json.loads(stream.take(chunk("c", [3], "length", id="two", created=9))[6:])
    assert (later["id"], later["created"], later["seed"]) == ("one", 1, 3)
    assert not stream.whole
    assert stream.take(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert stream.whole


@pytest.mark.parametrize("resume", ["a", 3, [1], {}, {"token_ids": None}, {"token_ids": "a"}, {"token_ids": [[1], 2]}])
def test_a_malformed_resume_is_left_to_the_server(resume: Any) -> None:
    sent = Delivered({**chat("Hi"), "seed": 3, "stream": True, "resume": resume}).request()
    assert sent["resume"] == resume


def event(number: int, kind: str, key: str, **more: Any) -> bytes:
    data = {"type": f"response.{kind}", "sequence_number": number, "item_id": f"msg_{key * 32}00", **more}
    return b"event: x\ndata: " + json.dumps(data).encode() + b"\n\n"


def test_events_count_once_one_has_token_ids_and_are_numbered_as_one_answer() -> None:
    stream = DeliveredEvents({"input": "Hi", "seed": 3})
    delta = {"output_index": 0, "delta": "a", "logprobs": [1]}
    assert stream.take(event(5, "content_part.added", "a")) == b""
    assert stream.take(event(6, "output_text.delta", "a", **delta, token_ids=[7])).count(b"event: ") == 2
    assert stream.take(event(7, "output_text.delta", "a", **delta)) == b""  # its token ids never come
    assert stream.request()["resume"] == {"token_ids": [7]}
    went_on = stream.take(event(0, "output_text.done", "b", output_index=0, logprobs=[], token_ids=[8]))
    assert json.loads(went_on.partition(b"data: ")[2]) == {
        "type": "response.output_text.done", "sequence_number": 2, "item_id": f"msg_{'a' * 32}00", "output_index": 0,
        "logprobs": [1],
    }  # fmt: skip


def test_another_server_goes_on_after_one_that_ends() -> None:
    stream = Delivered({**chat("Hi"), "seed": 3})
    stream.take(chunk("a", [1]))
    with pytest.raises(LostError, match="ends"):
        stream.take(b'data: {"error": {"message": "it ends", "code": "shutting_down"}}\n\n')
    assert stream.request()["resume"] == {"token_ids": [1]}
