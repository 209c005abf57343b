"""Real Dynamo on this machine, without etcd or NATS: a frontend and two workers (scripts/scale installs it)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from tests.server.foreign import skip

PYTHON = Path(__file__).parents[2] / ".venv" / "dynamo" / "bin" / "python"
CHAT = [{"role": "user", "content": "Count to thirty."}]
LENGTH = 240
OURS = ["outpace.integrations.dynamo", "--model", "demo", "--threads", "1", "--drafter", "ngram"]


@dataclass
class Dynamo:
    url: str
    model: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # the frontend, then the workers

    def ask(self, **body: Any) -> Any:
        return urllib.request.urlopen(self._request(body), timeout=60)

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        data = json.dumps({"model": self.model, "messages": CHAT, **body}).encode()
        return urllib.request.Request(f"{self.url}/v1/chat/completions", data, {"content-type": "application/json"})

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    @property
    def workers(self) -> int:
        """How many the frontend knows, once it serves the model."""
        try:
            return (
                self.get("/health").count('"endpoint":"generate"') if f'"{self.model}"' in self.get("/v1/models") else 0
            )
        except OSError:
            return 0

    @property
    def migrations(self) -> float:
        lines = re.findall(r"^dynamo_frontend_model_migration_total\{.*\} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, lines))


@contextmanager
def started(home: Path, worker: list[str], model: str) -> Iterator[Dynamo]:
    """A frontend and two workers that serve ``model``, with files in ``home``."""
    home.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ, "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(home / "discovery"),
        "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    front = ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), "--migration-limit", "3"]
    made = Dynamo(f"http://127.0.0.1:{port}", model)
    try:
        for i, command in enumerate((front, worker, worker)):
            with (home / f"{i}.log").open("wb") as log:
                run = [str(PYTHON), "-m", *command]
                made.processes.append(subprocess.Popen(run, env=env, cwd=home, stdout=log, stderr=subprocess.STDOUT))
        until = time.monotonic() + 120
        while made.workers < 2:
            ended = [i for i, process in enumerate(made.processes) if process.poll() is not None]
            assert (ended, time.monotonic() < until) == ([], True), "".join(
                p.read_text() for p in sorted(home.glob("*.log"))
            )
            time.sleep(0.2)
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (PYTHON.parents[1] / ".made").exists():
        skip("ai-dynamo", "scale")
    return tmp_path_factory.mktemp("dynamo")


@pytest.fixture(scope="module")
def dynamo(home: Path) -> Iterator[Dynamo]:
    with started(home / "whole", OURS, "demo") as dynamo:
        yield dynamo


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("demo", drafter="none", threads=1) as engine:
        yield engine


@dataclass(eq=False)
class Stream(threading.Thread):
    """Reads an answer as it comes."""

    dynamo: Dynamo
    body: dict[str, Any]
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # with logprobs
    others: list[str] = field(default_factory=list)  # what came that is no chunk of the answer

    def __post_init__(self) -> None:
        super().__init__()

    def run(self) -> None:
        with self.dynamo.ask(**self.body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    found = json.loads(line[6:])
                    if found.get("choices"):
                        (choice,) = found["choices"]
                        self.pieces.append(choice["delta"].get("content") or "")
                        self.tokens += [each["token_id"] for each in (choice.get("logprobs") or {}).get("content", ())]
                    else:
                        self.others.append(line.decode())
                elif line.strip() not in (b"", b"data: [DONE]"):
                    self.others.append(line.decode())


def refused(dynamo: Dynamo, **body: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as error, dynamo.ask(**body):
        pass
    assert error.value.code == 400
    return error.value.read().decode()


def test_a_grammar_in_the_servers_spelling(dynamo: Dynamo) -> None:
    for guided, allowed in (({"guided_choice": ["a.b", "c"]}, {"a.b", "c"}), ({"guided_regex": "x{3}"}, {"xxx"})):
        with dynamo.ask(max_tokens=8, **guided) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] in allowed
    assert '"code":400' in refused(dynamo, max_tokens=8, guided_regex="(")


def test_what_cannot_be_is_refused_with_its_reason(dynamo: Dynamo) -> None:
    assert "temperature=1e-05 is too close to 0" in refused(dynamo, temperature=1e-5)
    wrong = {"annotations": ["outpace.resume:one"]}
    assert "has no token ids" in refused(dynamo, temperature=0, nvext=wrong)


def choices(dynamo: Dynamo, **body: Any) -> list[dict[str, Any]]:
    with dynamo.ask(**body) as answer:
        return sorted(json.load(answer)["choices"], key=lambda choice: int(choice["index"]))


def test_several_choices_and_going_on_with_them(dynamo: Dynamo, engine: Engine) -> None:
    """The engine's own samples, to the bit; those that end before the last one by length have no reason."""
    asked: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 24, "stop": ["."]}
    whole = engine.generate_many([CHAT], SamplingParams(**asked, logprobs=True))
    found = choices(dynamo, **asked, logprobs=True)
    tokens = [[each["token_id"] for each in choice["logprobs"]["content"]] for choice in found]
    assert tokens == [list(result.token_ids) for result in whole]
    assert [choice["message"]["content"] for choice in found] == [result.text for result in whole]
    for choice, result in zip(found, whole, strict=True):
        figures = [np.float32(each["logprob"]) for each in choice["logprobs"]["content"]]
        assert figures == [np.float32(each.logprob) for each in result.logprobs]
    reasons = [(choice["finish_reason"], result.finish_reason) for choice, result in zip(found, whole, strict=True)]
    assert {"stop", "length"} == {ours for _, ours in reasons}
    assert all(theirs in (ours, *[None] * (ours == "length")) for theirs, ours in reasons)
    resumed = [own[: 3 * i] for i, own in enumerate(tokens)]
    annotations = [f"outpace.resume:{json.dumps(resumed)}"]
    rests = choices(dynamo, **asked, logprobs=True, nvext={"annotations": annotations})
    for choice, rest, before, own in zip(found, rests, resumed, tokens, strict=True):
        assert rest["logprobs"]["content"] == choice["logprobs"]["content"][len(before) :]
        text: str = rest["message"]["content"]
        assert choice["message"]["content"].endswith(text)
        assert text or len(before) + 2 > len(own)


SCHEMA = {
    "type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"],
    "additionalProperties": False,
}  # fmt: skip


def test_an_answer_with_a_grammar_goes_on_where_the_client_says(dynamo: Dynamo) -> None:
    wished = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA}}
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "response_format": wished, "logprobs": True}
    with dynamo.ask(**body) as answer:
        whole = json.load(answer)["choices"][0]
    tokens = [each["token_id"] for each in whole["logprobs"]["content"]]
    assert json.loads(whole["message"]["content"]).keys() == {"fruit"}
    with dynamo.ask(**body, nvext={"annotations": [f"outpace.resume:{json.dumps(tokens[:4])}"]}) as answer:
        rest = json.load(answer)["choices"][0]
    assert rest["logprobs"]["content"] == whole["logprobs"]["content"][4:]
    assert whole["message"]["content"].endswith(rest["message"]["content"])


def broken(home: Path, worker: list[str], model: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Answers of which some lost their worker in mid-stream; all over again where they were whole before that."""
    for number in range(5):
        with started(home / f"broken-{number}", worker, model) as dynamo:
            streams = [Stream(dynamo, body) for body in bodies]
            for stream in streams:
                stream.start()
            while any(len(stream.pieces) < 8 and stream.is_alive() for stream in streams):
                time.sleep(0.01)
            dynamo.processes[1].send_signal(signal.SIGKILL)
            for stream in streams:
                stream.join(120)
            if dynamo.migrations:
                return streams
    raise AssertionError("no answer was left when its worker was killed")


def test_streams_of_a_killed_worker_go_on_with_the_same_tokens(home: Path, engine: Engine) -> None:
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.3, "presence_penalty": 0.4},
        {"temperature": 0.7, "seed": 11, "top_p": 0.9},
    ]
    whole = engine.generate_many(
        [CHAT] * len(wishes), [SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, **wish) for wish in wishes]
    )
    bodies = [{**wish, "max_tokens": LENGTH, "min_tokens": LENGTH, "stream": True} for wish in wishes]
    for stream, result in zip(broken(home / "ours", OURS, "demo", bodies), whole, strict=True):
        assert ("".join(stream.pieces), stream.others) == (result.text, [])


def test_streams_of_a_worker_that_knows_no_migration_begin_anew(home: Path) -> None:
    """Dynamo's own sample engine, whose answer is 1, 2, 3 ...: what the others would otherwise do, too."""
    code = "from outpace.integrations.dynamo import *; print(card_of(resolve('demo')))"
    model = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    worker = ["dynamo.common.backend.sample_main", "--model-name", model, "--delay", "0.03"]
    body = {"max_tokens": 60, "ignore_eos": True, "logprobs": True, "stream": True}
    lost = []
    for stream in broken(home / "sample", [*worker, "--discovery-backend", "file"], model, [body] * 4):
        assert len(stream.tokens) == 60
        if stream.tokens != [*range(1, 61)]:
            lost.append(stream.tokens.index(1, 1))
            assert stream.tokens == [*range(1, lost[-1] + 1), *range(1, 61 - lost[-1])]
    assert lost
