"""``outpace verify --url`` against scripted servers: one that diverges is found, with its gap; others pass."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from outpace.cli import verify as command
from outpace.cli.options import Common, Draft, Load, Sampling
from outpace.measure.remote import Answer, Remote, RemoteError
from tests.fake_hub import plain, serving

WORDS = ["The", " sky", " is", " blue", ".", " é"]
Change = Callable[[dict[str, Any], int], dict[str, Any] | None]


class Scripted:
    """An OpenAI-compatible server that says the same to all. ``change``: given the body and how many requests run,
    what of the answer is otherwise: words, logprob, status."""

    def __init__(self, change: Change | None = None, *, speculates: bool = True, model: str = "m") -> None:
        self.change, self.speculates, self.model = change, speculates, model
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self._inside, self._lock = 0, threading.Lock()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.keys.add(request.headers.get("Authorization"))
        if request.command == "GET":
            return plain(request, 200, json.dumps({"data": [{"id": self.model}]}).encode())
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self._lock:
            self.bodies.append(body)
            self._inside += 1
            crowd = self._inside
        if not self.speculates and "speculation" in body:
            error = {"error": {"message": "unknown field speculation", "type": "x", "param": None, "code": None}}
            self._leave()
            return plain(request, 400, json.dumps(error).encode())
        change = (self.change(body, crowd) if self.change else None) or {}
        if "status" in change:
            self._leave()
            return plain(request, change["status"], b"{}", change.get("headers"))
        words = change.get("words", WORDS)[: body["max_tokens"]]
        content = [
            {
                "token": word,
                "logprob": change.get("logprob", -0.5),
                "bytes": list(word.encode()),
                "top_logprobs": [
                    {"token": t, "logprob": lp, "bytes": None} for t, lp in ((word, -0.5), (" red", -0.5004))
                ],
            }
            for word in words
        ]
        choice: dict[str, Any] = {"message": {"content": "".join(words)}, "finish_reason": "stop"}
        if body.get("logprobs") and not change.get("silent"):
            choice["logprobs"] = {"content": content}
        usage = {"speculation": {"drafter": "x"}} if self.speculates else {}
        self._leave()
        if body.get("stream"):
            chunk = {"choices": [{**choice, "delta": choice["message"]}]}
            told = [json.dumps(chunk), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
            return plain(request, 200, "".join(f"data: {its}\n\n" for its in told).encode())
        return plain(request, 200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1


Served = Callable[[Scripted], str]


@pytest.fixture
def served() -> Iterator[Served]:
    with ExitStack() as held:
        yield lambda server: held.enter_context(serving(server.answer))


Verify = Callable[..., tuple[int, Any]]


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"Say {i}"}) + "\n" for i in range(6)))
    monkeypatch.setenv("OUTPACE_API_KEY", "k3y-k3y")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def run(
        url: str | None, *, model: str = "demo", sampling: Sampling | None = None, **options: Any
    ) -> tuple[int, Any]:
        code = command.run(
            Load(model=model), Draft(), sampling or Sampling(), Common(json=Path("-")), prompts, url=url,
            **{"concurrency": 4, **options},
        )  # fmt: skip
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_server_that_keeps_its_word(served: Served, verify: Verify) -> None:
    server = Scripted()
    code, said = verify(served(server) + "/v1/", sampling=Sampling(top_p=0.9, temperature=0.7))
    assert code == 0
    assert [its["identical"] for its in said["compared"]] == [6, 6]
    assert [its["b"] for its in said["compared"]] == ["4 at once", "speculation off"]
    assert server.keys == {"Bearer k3y-k3y"}
    assert sum(body.get("speculation") == {"off": True} for body in server.bodies) == 1 + 6
    assert all(body["seed"] == said["seed"] and body["top_p"] == 0.9 for body in server.bodies[1:])


def test_speculation_that_changes_a_token_is_found(served: Served, verify: Verify) -> None:
    def drafted(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        wrong = "speculation" not in body and "Say 3" in str(body["messages"])
        return {"words": [*WORDS[:3], " red", "."]} if wrong else None

    code, said = verify(served(Scripted(drafted)))
    assert code == 1
    crowded, off = said["compared"]
    assert crowded["identical"] == 6
    assert (off["identical"], off["near_ties"], off["different"]) == (5, 1, 0)
    (found,) = (its for its in off["prompts"] if its["difference"])
    assert found["id"] == "p3"
    assert {k: found["difference"][k] for k in ("what", "index", "a", "b")} == {
        "what": "token", "index": 3, "a": " red", "b": " blue",
    }  # fmt: skip
    assert found["difference"]["gap"] == pytest.approx(0.0004)


def test_bits_that_change_in_a_crowd_are_found(served: Served, verify: Verify) -> None:
    def crowded(body: dict[str, Any], crowd: int) -> dict[str, Any] | None:
        if len(server.bodies) <= 7:  # the probe, and the first six
            return None
        return {"logprob": -0.5 - 2**-50}

    server = Scripted(crowded, speculates=False)
    code, said = verify(served(server))
    assert code == 1
    (only,) = said["compared"]
    assert only["other_logprobs"] == 6
    assert only["prompts"][0]["difference"]["gap"] == 2**-50
    assert "does not take it" in said["notes"][0]
    assert "unknown field speculation" in said["notes"][0]


def test_two_servers(served: Served, verify: Verify) -> None:
    a, b = Scripted(model="ours"), Scripted(lambda body, crowd: {"logprob": -0.4}, model="theirs", speculates=False)
    code, said = verify(served(a), against=served(b))
    assert code == 0
    assert said["compared"][0]["other_logprobs"] == 6
    assert {body["model"] for body in b.bodies} == {"theirs"}
    b.change = lambda body, crowd: {"words": WORDS[:5], "silent": True}
    code, said = verify(served(a), against=served(b))
    assert code == 1
    assert said["compared"][0]["different"] == 6
    assert said["compared"][0]["prompts"][0]["difference"]["what"] == "text"


def test_streams_say_what_answers_say() -> None:
    """Half a character in one event and half in the next; an error in the middle; an end that is none."""
    content = [{"token": "�", "bytes": [0xC3], "logprob": -1.0}, {"token": "�", "bytes": [0xA9], "logprob": -2.0}]
    events: list[Any] = [
        {"system_fingerprint": "fp", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": {"content": content[:1]}}]},
        {"choices": [{"index": 0, "delta": {"content": "é"}, "logprobs": {"content": content[1:]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"speculation": {"drafter": "x"}}},
    ]

    def streamed(*more: bytes) -> Answer:
        data = (
            b": alive\n\n" + b"".join(b"data: " + json.dumps(its).encode() + b"\n\n" for its in events) + b"".join(more)
        )
        with serving(lambda request: plain(request, 200, data)) as url:
            return Remote(url).chat({}, stream=True)

    answer = streamed(b"data: [DONE]\n\n")
    assert (answer.text, answer.finish, answer.fingerprint) == ("é", "stop", "fp")
    assert answer.tokens is not None
    assert [token.text.encode("utf-8", "surrogateescape") for token in answer.tokens] == [b"\xc3", b"\xa9"]
    assert answer.speculation == {"drafter": "x"}
    with pytest.raises(RemoteError, match="without"):
        streamed()
    with pytest.raises(RemoteError, match="in the middle"):
        streamed(b'data: {"error": {"message": "no"}}\n\n')
    with pytest.raises(RemoteError, match="no chat completion"):
        streamed(b"data: 3\n\n")
