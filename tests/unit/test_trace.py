"""Traces: nothing is lost between the engine's records and the file, and nothing about the file reaches the engine."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.engine.engine import Engine
from outpace.engine.intake import encoder
from outpace.engine.request import RowRecord
from outpace.engine.step import places
from outpace.errors import ParameterError
from outpace.exact.drafts import Draft
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.measure.replay import ReplayDrafter, replay
from outpace.measure.trace import VERSION, lines, read, row_line, row_of, step_line, tracing
from outpace.models.fingerprint import fingerprint
from outpace.params import SamplingParams
from outpace.text.answer import Decoder, TextReader, pieces
from tests.toy import ToyModel
from tests.tracing import REQUESTS, VOCAB, Branches, Spelled, engine, ids, record

BEFORE = Path(__file__).parents[1] / "recorded" / "format-1.trace"  # as version 0.1.0 wrote it


@pytest.mark.parametrize("size", [5, "auto"])
def test_everything_the_engine_told_is_read_back(tmp_path: Path, size: int | str) -> None:
    trace, steps, results = record(tmp_path / "run.trace", made=engine(size=size))
    assert trace.cut is None
    assert len(trace.steps) == len(steps) > 8
    assert any(row.parents != tuple(range(-1, len(row.tokens) - 1)) for step in trace.steps for row in step.rows)
    assert any(len(row.kept) < len(row.tokens) for step in trace.steps for row in step.rows) == (size == "auto")
    for told, step in zip(steps, trace.steps, strict=True):
        assert replace(step, rows=(), seconds={}) == replace(told, rows=(), seconds={})
        assert step.seconds == pytest.approx(dict(told.seconds), abs=1e-6)
        for row, own in zip(step.rows, told.rows, strict=True):
            unrounded = {"confidence": own.confidence, "expected": own.expected, "worth": own.worth}
            assert replace(row, **unrounded) == own
            for name, value in unrounded.items():
                assert getattr(row, name) == (None if value is None else pytest.approx(value, abs=1e-4))
            assert [row.tokens[node] for node in row.path] == list(row.verdict[:-1])
            assert row.sources == ("branches",) * len(row.tokens)
    for (prompt, given_), request in zip(REQUESTS, trace.requests, strict=True):
        assert request.prompt == tuple(prompt)
        assert request.sampling() == SamplingParams(**{"seed": 0, **given_})
    outputs = trace.outputs()
    assert {(r.request, r.sample): list(r.token_ids) for r in results} == outputs
    for told_result, result in zip(sorted(results, key=lambda r: (r.request, r.sample)), _sorted(trace), strict=True):
        assert result.text == told_result.text == "".join(result.pieces)
        assert (result.sources, result.finish_reason) == (told_result.sources, told_result.finish_reason)
        assert result.stats["tokens"] == told_result.completion_tokens
    assert {token: chr(97 + token) for token in trace.texts} == trace.texts


def _sorted(trace: Any) -> list[Any]:
    return sorted(trace.results, key=lambda r: (r.request, r.sample))


@st.composite
def trimmed(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A tree, parents before children, equal siblings among them; and which of its nodes stay, ancestors with them."""
    k = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(k)]
    tokens = draw(st.lists(st.integers(0, 2), min_size=k, max_size=k))
    seen: set[tuple[int, int]] = set()
    for i in range(k):  # among equal siblings verify.walk follows one, so a tree has no others
        while (parents[i], tokens[i]) in seen:
            tokens[i] += 1
        seen.add((parents[i], tokens[i]))
    stays: list[int] = []
    for i in range(k):
        if (parents[i] < 0 or parents[i] in stays) and draw(st.booleans()):
            stays.append(i)
    return tokens, parents, stays


@given(trimmed())
def test_kept_nodes_are_found_among_the_proposed(tree: tuple[list[int], list[int], list[int]]) -> None:
    tokens, parents, stays = tree
    place = {-1: -1, **{node: i for i, node in enumerate(stays)}}
    kept = Draft([tokens[i] for i in stays], [place[parents[i]] for i in stays])
    assert places(Draft(tokens, parents), kept) == place


def test_numbers_that_json_has_not_survive() -> None:
    nan, inf = float("nan"), float("inf")
    told = RowRecord(0, 0, 0, 5, (3,), (-1,), (nan,), ("a",), (0,), (3, 4), (0,), 2, 1, 1, inf, "so", (-inf,), True)
    row = row_of(json.loads(json.dumps(row_line(told), allow_nan=False)))
    assert replace(row, confidence=told.confidence) == told
    assert np.isnan(row.confidence[0])


def test_a_trace_of_before_is_read_written_and_replayed_as_it_was() -> None:
    trace, (_, others, cut) = read(BEFORE), lines(BEFORE)
    assert cut is trace.cut is None
    assert {(result.request, result.sample) for result in trace.results} == set(trace.outputs())
    for result in trace.results:  # the token that stopped one is no text
        tokens = trace.outputs()[result.request, result.sample]
        assert "".join(chr(97 + token) for token in tokens).removesuffix("b") == result.text == "".join(result.pieces)
    written = [line for line in others if "step" in line]
    keys = {key for line in written for row in line["r"] for key in row}
    assert keys == set("qnwatpcoskvhgzeyu") - {"z"}
    for step, line in zip(trace.steps, written, strict=True):
        again = json.loads(json.dumps(step_line(step)))
        assert [row_of(row) for row in again["r"]] == list(step.rows)
        for row in (*line["r"], *again["r"]):  # names that no node of the row has were there
            row.pop("o", None), row.pop("s", None)
        assert again == line
    (several,) = {row.sources for step in trace.steps for row in step.rows if len(set(row.sources)) > 1}
    assert set(several) == {"ngram", "branches"}
    assert {len(won) for won in trace.margins.values()} == {len(tokens) for tokens in trace.outputs().values()}
    drafter = ReplayDrafter(trace)
    with Engine(ToyModel(VOCAB), Spelled(), drafter=drafter, size=drafter.size) as made:
        report = replay(trace, made, drafter)
    assert report.identical
    assert report.samples == len(trace.results) == 3


def test_at_most_one_write_a_step_a_request_and_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: (sizes.append(len(data)), write(file, data))[1])
    trace, steps, results = record(tmp_path / "run.trace")
    assert len(sizes) <= len(steps) + len(trace.requests) + len(results) + 2
    assert sum(sizes) == (tmp_path / "run.trace").stat().st_size


@pytest.mark.parametrize("room", [0, 1, 700, 3000, 6000])
def test_a_full_disk_ends_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    expected = record(tmp_path / "all.trace")[0].outputs()
    header = len((tmp_path / "all.trace").read_bytes().split(b"\n")[0]) + 1
    left, write = header + room, os.write

    def short(file: int, data: bytes) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = write(file, data[:left])
        left -= n
        return n

    monkeypatch.setattr(os, "write", short)
    path = tmp_path / "some.trace"
    with caplog.at_level(logging.WARNING), engine() as made, tracing(made, path) as writer:
        for prompt, params in REQUESTS:
            made.add(prompt, SamplingParams(**{"seed": 0, **params}))
        results = []
        while not made.idle:
            results += [delta.result for delta in made.step() if delta.result is not None]
        assert not writer.on
    assert {(r.request, r.sample): list(r.token_ids) for r in results} == expected
    assert [r.message for r in caplog.records if "No space left" in r.message] == [caplog.records[0].message]
    trace = read(path)
    assert path.read_bytes().endswith(b"}\n")
    assert trace.cut is not None
    assert {key: expected[key][: len(tokens)] for key, tokens in trace.outputs().items()} == trace.outputs()
    assert bool(trace.steps) == (room >= 3000)


def test_an_interrupt_between_two_halves_of_a_line_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, calls = tmp_path / "run.trace", os.write, 0

    def interrupted(file: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 8:
            return write(file, data[: len(data) // 2])
        if calls == 9:
            raise KeyboardInterrupt
        return write(file, data)

    monkeypatch.setattr(os, "write", interrupted)
    with engine() as made, tracing(made, path):
        made.add([1, 2, 3], SamplingParams(max_tokens=30, seed=0, temperature=1.0))
        interrupts = 0
        while not made.idle:
            try:
                made.step()
            except KeyboardInterrupt:
                interrupts += 1
        made.check()
    assert interrupts == 1
    trace = read(path)
    assert trace.cut is None
    steps = [step.index for step in trace.steps]
    missing = set(range(max(steps) + 1)) - set(steps)
    assert len(missing) == 1  # the one that was interrupted; all others are whole


def test_a_tokenizer_that_fails_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Spelled):
        def token(self, token_id: int) -> str | None:
            raise RuntimeError("no such thing")

    model, path = ToyModel(VOCAB), tmp_path / "run.trace"
    with Engine(model, Broken(), drafter=Branches(model)) as made, caplog.at_level(logging.WARNING):
        with tracing(made, path) as writer:
            result = made.generate([1, 2, 3], SamplingParams(max_tokens=5))
        assert result.completion_tokens == 5
        assert not writer.on
    assert caplog.text.count("no such thing") == 1
    assert read(tmp_path / "run.trace").cut is not None


def test_a_trace_cut_anywhere_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole_path, path = tmp_path / "run.trace", tmp_path / "cut.trace"
    whole, _, _ = record(whole_path, REQUESTS[:2])
    data = whole_path.read_bytes()
    header = data.index(b"\n") + 1
    for end in [*range(0, len(data), 97), header - 1, header, header + 1, len(data) - 1]:
        path.write_bytes(data[:end])
        if end < header:
            with pytest.raises(ParameterError, match="is no trace"):
                read(path)
            continue
        trace = read(path)
        assert trace.cut is not None
        assert trace.steps == whole.steps[: len(trace.steps)]
        assert trace.requests == whole.requests[: len(trace.requests)]
        assert trace.results == whole.results[: len(trace.results)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f'{{"trace": {VERSION + 1}, "outpace": "9.9"}}\n', rf"format {VERSION + 1}, written by outpace 9.9"),
        ('{"text": "hello"}\n', "is no trace"),
        ("", "is no trace"),
        ("\x00\x01\n\n", "is no trace"),
        (f'{{"trace": {VERSION}}}\nnonsense\n{{"end": {{}}}}\n', "line 2, is damaged"),
        (f'{{"trace": {VERSION}}}\n{{"step": 3}}\n{{"end": {{}}}}\n', "no trace's"),
    ],
)
def test_what_is_no_trace_of_this_version_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "run.trace"
    path.write_text(content)
    with pytest.raises(ParameterError, match=said):
        read(path)
    with pytest.raises(ParameterError, match="cannot be read"):
        read(tmp_path / "none.trace")


def test_margins_say_by_how_much_each_token_won(tmp_path: Path) -> None:
    trace, _, results = record(tmp_path / "run.trace", scores=True)
    assert len(trace.margins) == len(results)
    model = ToyModel(VOCAB)
    for result in results:
        request = next(r for r in trace.requests if r.id == result.request)
        params, prefix = request.sampling(), list(request.prompt)
        rules, noise = rules_for(params, VOCAB, encoder(Spelled()), ()), Noise(request.seed, result.sample)
        chooser = Chooser.start(params, noise, rules, ids(*prefix))
        for token, margin in zip(result.token_ids, trace.margins[result.request, result.sample], strict=True):
            scores = chooser.scores(model.logits_after(prefix))
            others = np.delete(scores, token)
            assert margin == pytest.approx(scores[token] - others.max(), rel=1e-4)
            assert margin >= 0
            chooser = chooser.advance(token)
            prefix.append(token)


def test_where_it_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    with engine() as made:
        with pytest.raises(ParameterError, match="cannot be written"), tracing(made, tmp_path / "no" / "run.trace"):
            raise AssertionError("not reached")
        with tracing(made, tmp_path / "run.trace"):
            with pytest.raises(ParameterError, match="being watched"), tracing(made, tmp_path / "two.trace"):
                raise AssertionError("not reached")
            assert not (tmp_path / "two.trace").exists()
        assert made.on_step is None
        assert made.on_result is None


def test_pieces_are_the_text_whatever_the_characters_are_made_of() -> None:
    class Bytes(Decoder):
        """A byte a token: what a byte-level tokenizer is at its worst."""

        def decode(self, ids: Any, *, skip_special: bool = True) -> str:
            return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

        def token(self, token_id: int) -> str | None:
            return f"<0x{token_id:02X}>"

    for text in ("plain", "שלום 👩‍👩‍👧 ok", "a\u202eb\x00c\n", ""):
        found = pieces(TextReader(Bytes()), list(text.encode()))
        assert "".join(found) == text
        assert len(found) == len(text.encode())


def test_a_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = bytearray(os.urandom(3 << 20))
    (folder / "model.safetensors").write_bytes(weights)
    first = fingerprint(folder)
    assert fingerprint(folder) == first
    (folder / "notes.txt").write_text("no part of the model")
    assert fingerprint(folder) == first
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert fingerprint(folder) != first
    single = tmp_path / "a.gguf"
    single.write_bytes(weights)
    moved = tmp_path / "b.gguf"
    moved.write_bytes(weights)
    assert fingerprint(single) == fingerprint(moved)
