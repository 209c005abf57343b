"""A drafter is tuned while the server runs: what was answered is recorded, new weights are taken, answers stay."""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outpace import Engine
from outpace.drafters.learned.checkpoint import read
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.errors import ParameterError
from outpace.models.options import LoadOptions
from outpace.server.engines.tuning import Apart, recorded, renewed
from outpace.training.data import Answers
from tests.server.serving import Running, serving
from tests.server.test_lives import post
from tests.server.test_serve_cli import ask, process

SHIPPED = Path(__file__).parents[2] / "drafters" / "demo-eagle"
BODY = {
    "messages": [{"role": "user", "content": "Count from one to five, and back."}], "max_tokens": 24, "seed": 3,
    "ignore_eos": True, "return_token_ids": True, "reuse_prefix": False,
}  # fmt: skip


def saved(folder: Path, strength: float) -> None:
    """The shipped drafter, with its weights so many times as large: at 0 it drafts what nobody says."""
    its = read(SHIPPED)
    tensors = {name: value if value.dtype.kind in "iub" else value * strength for name, value in its.tensors.items()}
    write_checkpoint(folder, "eagle", its.config, tensors, {}, {}, dtype="float32")


def test_a_process_records_takes_new_weights_and_says_the_same(tmp_path: Path) -> None:
    saved(tmp_path / "weak", 0.0)
    saved(tmp_path / "good", 1.0)
    link, kept = tmp_path / "tuned", tmp_path / "recorded"
    link.symlink_to("weak")
    options = ("--drafter", f"eagle:{link}", "--size", "4", "--record", str(kept), "--reload-every", "0.05")
    with process(*options) as (its, port):
        answers = [ask(port, BODY)[1]]
        link.unlink()
        link.symlink_to("good")
        assert its.stderr is not None
        assert any("its drafter has new weights" in line for line in its.stderr)
        link.unlink()  # nothing is there: it goes on with what it has
        assert any("its drafter keeps the weights that it has" in line for line in its.stderr)
        answers.append(ask(port, BODY)[1])
        ask(port, {**BODY, "seed": 4})
        its.terminate()
        assert its.wait(30) == 0
    assert answers[0]["choices"] == answers[1]["choices"]
    accepted = [answer["usage"]["speculation"]["accepted"] for answer in answers]
    assert accepted[0] < accepted[1]
    found = {tuple(answer.tokens.tolist()) for answer in Answers.open(kept)}
    assert len(found) == 2  # what was said twice is there once
    assert (*answers[0]["prompt_token_ids"], *answers[0]["choices"][0]["token_ids"]) in found
    assert kept.stat().st_mode & 0o077 == 0


def test_recording_goes_beside_traces(tmp_path: Path) -> None:
    engine = Engine.load("demo", drafter="ngram", max_length=512)
    with recorded(engine, tmp_path / "r", "demo", LoadOptions()), serving(engine, traces=4) as running:
        for seed in (1, 2):
            status, _, answer = post(running, {**BODY, "model": "demo", "seed": seed})
            assert status == 200
        assert running.service.traces is not None
        assert running.service.traces.of(answer["id"], "")["cut"] is None
    assert len(Answers.open(tmp_path / "r")) == 2


def test_a_thread_that_writes_is_never_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    begun, gate, apart, done = threading.Event(), threading.Event(), Apart(most=2), list[int]()

    def slow() -> None:
        begun.set()
        assert gate.wait(30)
        raise ZeroDivisionError  # a fault of its own ends nothing

    apart.put(slow)
    assert begun.wait(30)
    for number in range(4):
        apart.put(partial(done.append, number))
    gate.set()
    apart.close()
    assert (done, apart.full) == ([0, 1], 2)
    assert caplog.text.count("some are left out") == caplog.text.count("an answer was not recorded") == 1


def test_what_is_wrong_with_new_weights_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a drafter says, the loop goes on looking."""
    said: list[Any] = [True, ParameterError("one"), ParameterError("one"), ParameterError("two"), False, True]

    def reload(self: NgramDrafter) -> bool:
        its = said.pop(0) if said else False
        if isinstance(its, Exception):
            raise its
        return bool(its)

    monkeypatch.setattr(NgramDrafter, "reload", reload)
    with serving(Engine.load("demo", drafter="ngram", max_length=512)) as running, caplog.at_level(logging.INFO):
        assert post(running, {**BODY, "model": "demo"})[0] == 200
        running.call(looked(running, said))
    told = [record.getMessage() for record in caplog.records if record.name == "outpace.server.engines.tuning"]
    keeps = "keeps the weights that it has"
    assert [line.removeprefix("demo: its drafter ") for line in told] == [
        "has new weights", f"{keeps}: one", f"{keeps}: two", "has new weights",
    ]  # fmt: skip


async def looked(running: Running, said: list[Any]) -> None:
    """Let it look until all was said."""
    looking = asyncio.create_task(renewed(running.service, 0.01))
    while said:
        await asyncio.sleep(0.01)
    looking.cancel()
