"""Traces: nothing is lost between the engine's records and the file, and nothing about the file reaches the engine."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.control.adaptive import Decision
from outpace.engine.intake import encoder
from outpace.engine.request import StepRecord
from outpace.engine.text import Decoder, TextReader, pieces
from outpace.errors import ParameterError
from outpace.exact.drafts import Draft, Drafts, Verdicts
from outpace.exact.noise import Noise
from outpace.exact.rules import rules_for
from outpace.exact.sampling import Chooser
from outpace.measure.trace import TraceWriter, _kept, rows_of, tracing
from outpace.measure.tracefile import VERSION, read, row_from
from outpace.models.fingerprint import fingerprint
from outpace.params import SamplingParams
from tests.toy import ToyModel
from tests.tracing import REQUESTS, VOCAB, Spelled, engine, ids, record


@pytest.mark.parametrize("size", [5, "auto"])
def test_everything_the_engine_told_is_read_back(tmp_path: Path, size: int | str) -> None:
    trace, steps, results = record(tmp_path / "run.trace", made=engine(size=size))
    assert trace.cut is None
    assert len(trace.steps) == len(steps) > 8
    assert any(row.parents != tuple(range(-1, len(row.tokens) - 1)) for step in trace.steps for row in step.rows)
    assert any(len(row.kept) < len(row.tokens) for step in trace.steps for row in step.rows) == (size == "auto")
    for told, step in zip(steps, trace.steps, strict=True):
        assert step.index == told.index
        assert step.chunks == tuple((c.request, c.sample, c.row, c.start, c.count) for c in told.chunks)
        assert step.seconds == pytest.approx(dict(told.seconds), abs=1e-6)
        assert len(step.rows) == len(told)
        for i, row in enumerate(step.rows):
            assert (row.request, row.sample, row.row) == (told.requests[i], told.samples[i], told.rows[i])
            assert (row.start, row.gained) == (told.starts[i], told.gained[i])
            proposed, kept, verdict = told.proposed.row(i), told.kept.row(i), told.verdicts.row(i)
            assert row.tokens == tuple(proposed.tokens)
            assert row.parents == tuple(proposed.parents)
            assert [row.tokens[node] for node in row.kept] == kept.tokens
            assert row.verdict == tuple(verdict.tokens.tolist())
            assert row.path == tuple(row.kept[node] for node in verdict.path.tolist())
            assert [row.tokens[node] for node in row.path] == list(row.verdict[:-1])
            assert row.sources == ("branches",) * len(row.tokens)
            decision = told.decisions[i]
            assert (row.size, row.why) == (decision.size, decision.why)
            assert row.expected == (None if decision.expected is None else pytest.approx(decision.expected, abs=1e-4))
            assert row.worth == pytest.approx(decision.worth, abs=1e-4)
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
    assert _kept(Draft(tokens, parents), kept) == stays


def test_numbers_that_json_has_not_survive() -> None:
    proposed = Drafts(ids(3)[None], ids(1), confidence=np.array([[np.nan]], np.float32), sources=("a",))
    verdicts = Verdicts(ids(3, 4)[None], ids(1), ids(0)[None])
    told = StepRecord(
        0, (0,), (0,), (0,), (5,), proposed, proposed, verdicts, (2,), (1,), (Decision(1, float("inf"), "so"),), (), {}
    )
    row = row_from(json.loads(json.dumps(rows_of(told), allow_nan=False))[0])
    assert row.expected == float("inf")
    assert row.near_ties == 1
    assert np.isnan(row.confidence[0])


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

    with engine() as made, caplog.at_level(logging.WARNING):
        writer = TraceWriter(tmp_path / "run.trace", {}, Broken(), made.request)
        made.on_step = writer.step
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
