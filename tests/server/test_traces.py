"""The steps of an answer: all of them, only its own, for its own key alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outpace import Engine
from outpace.measure.trace import read
from tests.server.serving import Running, serving

KEYS = ("the-first-key", "the-second-key")


def trace(served: Running, id_: str, key: str) -> Any:
    request = urllib.request.Request(f"{served.url}/v1/traces/{id_}", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_the_steps_of_the_last_answers(tmp_path: Path) -> None:
    def ask(i: int) -> Any:
        return served.client().with_options(api_key=KEYS[i % 2]).completions.create(
            model="demo", prompt=f"{i} {i} {i} {i}", max_tokens=20, temperature=0.5, seed=i, n=1 + i % 2,
            extra_body={"return_token_ids": True},
        )  # fmt: skip

    kept = {"traces": 3, "trace_probabilities": True}
    with serving(Engine.load("demo", drafter="suffix", max_length=512), api_keys=KEYS, **kept) as served:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, range(4)))
        found, gone = [], []
        for i, answer in enumerate(answers):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                trace(served, answer.id, KEYS[1 - i % 2])
            try:
                found.append((answer, trace(served, answer.id, KEYS[i % 2])))
            except urllib.error.HTTPError as error:
                gone.append(error.code)
        assert gone == [404]  # the oldest: whichever began first
        served.at_rest()
    for answer, its in found:
        path = tmp_path / answer.id
        lines = [its["header"], *its["lines"], {"end": {}}]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        whole = read(path)
        assert whole.cut is None
        assert its["cut"] is None
        assert [list(ids) for ids in whole.outputs().values()] == [choice.token_ids for choice in answer.choices]
        assert [result.text for result in sorted(whole.results, key=lambda its: its.sample)] == [
            choice.text for choice in answer.choices
        ]
        for row in (row for step in whole.steps for row in step.rows):  # the choices along the path are the verdict
            choices = {place.node: place.choice for place in row.places}
            assert tuple(choices[node] for node in (-1, *row.path)) == row.verdict
        assert {row.request for step in whole.steps for row in step.rows} == {whole.requests[0].id}
