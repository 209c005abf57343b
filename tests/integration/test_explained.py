"""What a step's record says of probabilities and random numbers, against transformers' own forward and its filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from outpace import Engine, SamplingParams
from outpace.drafters.base import Drafter, RowView
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.request import Place, RowRecord, StepRecord
from outpace.exact.drafts import Drafts
from outpace.measure.trace import read, tracing
from outpace.models.torch.gguf import build
from outpace.models.weights.gguf import GGUFFile
from tests.integration.conftest import SIZES, Load
from tests.native.native_helpers import Tiny

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def places(rows: list[RowRecord], output: list[int]) -> Iterator[tuple[RowRecord, Place, list[int]]]:
    """Every place with the tokens before it."""
    for row in rows:
        for place in row.places:
            path, node = list[int](), place.node
            while node >= 0:
                path, node = [row.tokens[node], *path], row.parents[node]
            yield row, place, [*PROMPT, *output[: row.start - len(PROMPT)], *path]


@pytest.mark.parametrize(
    ("acceptance", "asked", "drafter"),
    [
        ("coupled", {"temperature": 0.9, "top_k": 7}, "model"),
        ("rejection", {"temperature": 0.9, "top_k": 7}, "model"),  # which draws
        ("rejection", {"temperature": 0.0}, "ngram"),  # one-hot
        ("rejection", {"temperature": 0.9, "top_k": 7}, "ngram"),
    ],
)
def test_a_record_says_what_decided(
    load: Load, tiny: Tiny, tmp_path: Path, acceptance: Any, asked: dict[str, Any], drafter: str
) -> None:
    steps: list[StepRecord] = []
    params = SamplingParams(max_tokens=16, seed=5, ignore_eos=True, **asked)
    with Engine(load(2), size=3) as engine:
        plain = engine.generate(PROMPT, params).token_ids
    drafts = NgramDrafter() if drafter == "ngram" else ModelDrafter(load(1), "model", SIZES["vocab"])
    with (
        Engine(load(2), drafter=drafts, size=3, acceptance=acceptance) as engine,
        tracing(engine, tmp_path / "run.trace", probabilities=True) as writer,
    ):
        engine.on_step = lambda step: (steps.append(step), writer.step(step))  # type: ignore[func-returns-value]
        output = list(engine.generate(PROMPT, params).token_ids)
    assert acceptance != "coupled" or tuple(output) == plain
    rows = [row for step in steps for row in step.rows]
    for step, again in zip(steps, read(tmp_path / "run.trace").steps, strict=True):
        for row, other in zip(step.rows, again.rows, strict=True):
            assert np.allclose(row.p, other.p, atol=1e-6, equal_nan=True)
            assert [place.trials for place in other.places] == [
                tuple(t._replace(chance=round(t.chance, 6), uniform=round(t.uniform, 6)) for t in place.trials)
                for place in row.places
            ]
            assert replace(other, p=(), q=(), places=()).path == row.path

    theirs = build(GGUFFile.open(tiny.path("F32", **SIZES, layers=2)), torch.float32, torch.device("cpu")).eval()
    filters = LogitsProcessorList()
    if params.temperature:
        filters = LogitsProcessorList([TemperatureLogitsWarper(params.temperature), TopKLogitsWarper(params.top_k)])
    seen, trials, residuals = 0, 0, 0
    known: dict[tuple[int, ...], Any] = {}  # logits after a sequence
    for row, place, before in sorted(places(rows, output), key=lambda each: -len(each[2])):
        if tuple(before) not in known:
            with torch.inference_mode():
                found = theirs(torch.tensor([before])).logits.double()[0]
            known.update({tuple(before[: n + 1]): each[None] for n, each in enumerate(found)})
        logits = known[tuple(before)]
        p = torch.softmax(filters(torch.tensor([before]), logits), -1)[0].numpy()
        children = [node for node in row.kept if row.parents[node] == place.node]
        for token, own, noise in place.likeliest:
            assert own == pytest.approx(p[token], abs=1e-4)
            assert (noise == 0) == (acceptance != "coupled" or not params.temperature)
        assert sum(one.p for one in place.likeliest) >= np.sort(p)[::-1][:5].sum() - 1e-4
        for node in children:
            assert row.p[node] == pytest.approx(p[row.tokens[node]], abs=1e-4)
        if acceptance == "coupled":
            best = max(place.likeliest, key=lambda one: np.log(max(one.p, 1e-300)) + one.noise)
            assert place.choice == best.token
        for trial in place.trials:
            trials += 1
            at = row.tokens[trial.node]
            own_p = p[at] if params.temperature else float(at == p.argmax())
            assert trial.chance == pytest.approx(min(1.0, own_p / row.q[trial.node]), abs=1e-3)
            assert trial.accepted == (trial.uniform < trial.chance) == (trial.node in row.path)
        if place.residual and drafter == "ngram" and params.temperature:  # one-hot q: p without the token is left
            residuals += 1
            left = p.copy()
            left[[row.tokens[node] for node in children]] = 0
            assert {one.token: one.p for one in place.residual} == pytest.approx(
                {one.token: left[one.token] / left.sum() for one in place.residual}, abs=1e-4
            )
        if place.residual and params.temperature:
            left = np.maximum([one.p - q for one, q in zip(place.likeliest, place.q, strict=True)], 0)
            ratio = {one.token: x for one, x in zip(place.likeliest, left, strict=True)}
            shares = [(one.p, ratio[one.token]) for one in place.residual if one.token in ratio]
            assert all(a * y == pytest.approx(b * x, abs=1e-6) for a, x in shares for b, y in shares)
        seen += 1
    assert seen >= len(output)
    assert (trials > 3) == (acceptance == "rejection")
    assert residuals > 2 or drafter != "ngram" or not params.temperature
    assert all((acceptance == "coupled") == bool(np.isnan(q)) for row in rows for q in row.q)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_wrong_draft_without_tokens_after_it_hides_nothing_else(load: Load, acceptance: Any) -> None:
    steps: list[StepRecord] = []

    def only_sixes(tokens: Any, logits: Any) -> None:
        logits[:6] = logits[7:] = -np.inf
        if set(tokens[len(PROMPT) :].tolist()) - {6}:
            logits[6] = -np.inf

    class Wrong(Drafter):
        name = "wrong"

        def propose(self, rows: Sequence[RowView], sizes: Any) -> Drafts:
            return Drafts.chains([[6, 5, 6][:size] for size in sizes.tolist()], self.name)

    params = SamplingParams(max_tokens=9, rules=(only_sixes,), ignore_eos=True)
    with Engine(load(2), drafter=Wrong(), size=3, acceptance=acceptance, on_step=steps.append) as engine:
        engine.probabilities = True
        engine.generate(PROMPT, params)
    rows = [row for step in steps for row in step.rows if row.kept]
    assert rows
    for row in rows:
        assert [(place.node, place.choice) for place in row.places] == [(-1, 6), (0, 6)][: len(row.verdict)]
        assert np.array_equal(row.p, [1, 0, np.nan][: len(row.p)], equal_nan=True)


def test_nothing_is_recorded_unless_asked(load: Load) -> None:
    steps: list[StepRecord] = []
    with Engine(load(2), on_step=steps.append) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=4))
        assert not any(row.places or row.p for step in steps for row in step.rows)
        engine.probabilities = True
        engine.generate(PROMPT, SamplingParams(max_tokens=4))
        assert all(len(row.places) == 1 for step in steps[-3:] for row in step.rows)
