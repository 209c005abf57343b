"""Benchmarks: they are listed, and Ctrl-C leaves what was measured."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import card, fairness, forward, paired, prove, scale, scores, serving
from benchmarks.__main__ import call
from benchmarks.paired import PHASES
from outpace.common.arrays import I32
from outpace.engine.engine import Engine
from outpace.measure.report import read
from outpace.measure.same import Difference
from outpace.models.families import FAMILIES
from outpace.params import SamplingParams
from tests.toy import ToyModel, ToyTokenizer


def test_benchmarks_are_listed_and_run_by_name() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True)

    listed = run("--help")
    assert listed.returncode == 0
    names = [line.split()[0] for line in listed.stdout.splitlines()[2:]]
    assert {"peers", "paired", "forward", "serving", "acceptance", "prove", "soak", "invariance"} <= set(names)
    assert "usage: python -m benchmarks prove" in run("prove", "--help").stdout
    assert "did you mean prove?" in run("porve").stdout


@pytest.mark.parametrize("option", ["--rounds", "--requests", "--tokens", "--concurrency"])
@pytest.mark.parametrize("count", ["0", "-2", "many"])
def test_a_count_that_would_measure_nothing_is_refused(
    option: str, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        call("serving", ["--prompts", "prompts.jsonl", f"{option}={count}"])
    assert ended.value.code == 2
    assert f"argument {option}: {count} is out of range: give a whole number of at least 1" in capsys.readouterr().err


def test_ctrl_c_leaves_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that are complete; a file has them, ``--json`` alone prints them, and text is elsewhere then."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "no" / "out.json"
    prompts.write_text('{"turns": ["a"]}\n{"turns": ["b"]}\n')
    row = {"drafter": "none", "tokens": [1], "steps": 4, "seconds": 1.0, "counted": 3, "by": dict.fromkeys(PHASES, 0.1)}

    def interrupted(source: Path, work: dict[str, Any]) -> list[dict[str, Any]]:
        if next(calls) == 3:  # the second round, whose first version has run
            raise KeyboardInterrupt
        return [{**row, "prompt": i} for i in range(2)]

    monkeypatch.setattr(paired, "_run", interrupted)
    for target in ([str(out)], []):
        calls = iter(range(9))
        assert call("paired", ["a/src", "b/src", "--prompts", str(prompts), "-d", "none", "--json", *target]) == 130
        said = capsys.readouterr()
        found = json.loads(out.read_text() if target else said.out)
        assert [[row["round"] for row in found[name]] for name in ("before", "after")] == [[0, 0], [0, 0]]
        assert "same tokens 2 of 2" in (said.out if target else said.err)
        assert "interrupted: what was measured until then is kept" in said.err


def test_ctrl_c_between_two_servers_leaves_what_both_were_asked() -> None:
    ours, theirs = (SimpleNamespace(rounds=rounds) for rounds in ({1: ["a", "b"], 4: ["c"], 8: []}, {1: ["d"]}))
    serving.paired([ours, theirs])  # type: ignore[list-item]
    assert (ours.rounds, theirs.rounds) == ({1: ["a"]}, {1: ["d"]})


def test_answers_that_end_in_a_loop_are_set_apart(capsys: pytest.CaptureFixture[str]) -> None:
    loop, calm = (1,) * 30, tuple(range(30))
    row = {"drafter": "none", "round": 0, "steps": 4, "by": dict.fromkeys(PHASES, 0.1), "counted": 10}
    found = {
        name: [
            {**row, "prompt": 0, "tokens": loop, "seconds": looping},
            {**row, "prompt": 1, "tokens": calm, "seconds": 1.0},
        ]
        for name, looping in (("before", 1.0), ("after", 0.25))
    }
    paired._report("none", found)
    said = capsys.readouterr().out
    assert "pooled 1.600" in said
    assert "loops end 1 answers, without these 10.0 -> 10.0 tokens/s, pooled 1.000" in said

    def served(name: str, ends: tuple[float, float]) -> Any:
        shots = [serving.Shot(0.0, (1.0, 1.0 + end), 30, "", ids) for end, ids in zip(ends, (loop, calm), strict=True)]
        return SimpleNamespace(name=name, rounds={4: [shots]})

    servers = [served("outpace", (1.0, 2.0)), served(serving.PLAIN, (10.0, 3.0))]
    rest = serving.without_loops(servers)["4"]
    assert (rest["looping"], rest["answers"], rest["speeds"]) == (1, 2, {"outpace": pytest.approx(1.5)})
    events = [
        (0.5, b'{"choices": [{"delta": {"content": "a"}, "token_ids": [5, 6]}], "usage": {"completion_tokens": 2}}')
    ]
    assert serving.parsed(0.0, [*events, (0.6, b"[DONE]")]).ids == (5, 6)


def test_ctrl_c_after_a_round_of_forwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter([1e9, 1e9])  # before the rounds, and after the first

    def bandwidth(threads: int) -> float:
        try:
            return next(reads)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(forward, "bandwidth", bandwidth)
    sizes = ("--contexts", "8", "--rows", "1", "--repeats", "1", "--prefill", "8", "--threads", "1")
    assert call("forward", [*sizes, "--json", str(tmp_path / "out.json")]) == 130
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [cell["width"] for cell in cells] == [*forward.WIDTHS, forward.CHUNK]
    assert "| context 8, auto KV |" in capsys.readouterr().out


def test_ctrl_c_between_two_servers_leaves_the_first_ones_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([{"JSON schemas": {"scores": {"valid": 1.0}, "texts": ["{}"]}}])

    def asked(*_: Any) -> dict[str, Any]:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(scores, "started", lambda *_: nullcontext(SimpleNamespace(remote=None)))
    monkeypatch.setattr(scores, "_schemas", asked)
    out = tmp_path / "out.json"
    assert call("scores", ["--schemas", str(tmp_path), "--json", str(out)]) == 130
    found = json.loads(out.read_text())["tasks"]["JSON schemas"]
    assert (found["scores"], found["drafted"], found["same"]) == ({"valid": 1.0}, None, None)
    assert "not compared" in capsys.readouterr().out
    assert "not compared" in read(out).figures["JSON schemas"]


def test_every_stage_of_a_card_runs_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is written once it is there; one that fails does not keep the others from running."""
    out, written = tmp_path / "out.json", list[set[str]]()
    emit = card.emit
    monkeypatch.setattr(card, "emit", lambda *a, **b: (emit(*a, **b), written.append(set(figures_of(out)))))
    monkeypatch.setitem(card.STAGES, "rows", (lambda _: 1 / 0, 0))
    assert call("card", ["--tiny", "--json", str(out)]) == 1
    figures = figures_of(out)
    assert [len(names) for names in written] == [*range(1, len(card.STAGES) + 1), len(card.STAGES)]
    assert set(figures) == set(card.STAGES)
    assert figures.pop("rows") == {"failed": "ZeroDivisionError: division by zero"}
    assert not [name for name, each in figures.items() if "failed" in each], capsys.readouterr().out
    assert figures["steps"]["eight"]["tokens_per_step"] == 8
    assert figures["eagle"]["chain of 5"]["tokens_per_step"] > 1
    assert call("card", ["--tiny", "--seconds", "0", "--json", str(out)]) == 0
    assert all("skipped" in each for each in figures_of(out).values())


def test_transformers_prompt_lookup_is_compared_prompt_by_prompt(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("Say one two three.\nSay it again, and again.\n")
    options = ["--prompts", str(prompts), "--dtype", "float32", "-n", "4", "-d", "ngram", "-d", "suffix"]
    assert call("lookup", [*options, "--json", str(out)]) == 0
    found = figures_of(out)
    assert list(found) == ["ngram float32", "suffix float32"]
    assert all(each["prompts"] == each["same"] == 2 for each in found.values())
    assert all(each["ratio"] >= each["least"] > 0 and len(each["first"]) == 2 for each in found.values())


def figures_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["figures"]
    return found


def test_ctrl_c_leaves_the_streams_that_were_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(running: Any, kind: str, wanted: Any, number: int, sent: signal.Signals) -> tuple[bool, float]:
        if number == 2:
            raise KeyboardInterrupt
        return True, 0.5

    running = SimpleNamespace(url="", servers=lambda: [1, 2], close=lambda: None)
    monkeypatch.setattr(scale, "Replicas", lambda *_: running)
    monkeypatch.setattr(scale, "stream", lambda *_: ({}, 0.0))
    monkeypatch.setattr(scale, "broken", broken)
    assert call("scale", []) == 130
    assert "2 streams, 2 of whose servers got SIGKILL: 2 the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "dtype", "gap", "code"),
    [
        ("transformers", "float32", 9e-4, 0),
        ("transformers", "float32", 0.01, 1),
        ("transformers", "bfloat16", 0.25, 0),
        ("transformers", "bfloat16", 0.75, 1),
        ("transformers", "bfloat16", None, 1),  # an answer ended early
        ("native", "bfloat16", 1e-5, 1),
    ],
)
def test_prove_fails_where_rounding_does_not_explain_a_difference(
    backend: str,
    dtype: str,
    gap: float | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    difference = Difference("token", 3, (5, 6), gap)
    monkeypatch.setattr(prove, "compare", lambda *given: difference)
    rows = [{"identical": True, "tokens": 8}, prove._gap(None, None, SamplingParams(seed=1), [], [5] * 8)]  # type: ignore[arg-type]
    rows = [{**row, "steps": 4, "drafted": 2, "accepted": 1} for row in rows]
    assert prove._report({"settings": {"backend": backend, "dtype": dtype}, "cases": {"ngram": rows}}) == code
    assert capsys.readouterr().out.splitlines()[1].split() == ["ngram", "1", str(1 - code), str(code), "2.00", "50%"]


def test_kinds_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("kinds", ["--short", "--seeds", "1", "--threads", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    patched = [line for line in lines if line[0] == "patched"]
    assert len(patched) > 5
    assert all(same == asked and int(accepted) > 0 for _, same, _, asked, accepted in patched)
    lines = [line for line in lines if line[0] != "patched"]
    assert [line[0] for line in lines] == [family.gguf for family in FAMILIES if family.gguf]
    for name, same, _, asked, accepted, reused in lines:
        assert same == asked, name
        assert min(int(asked) - 31, int(accepted), int(reused)) > 0, name


def test_rows_beside_a_prompt_are_timed_while_it_is_read() -> None:
    """Its steps alone, whatever they take: 60 tokens in chunks of 8; and the engine is as it was."""

    class Spelling(ToyTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> I32:
            return np.array([ord(c) % 11 for c in text], np.int32)

    with Engine(ToyModel(seed=1, max_length=4096), Spelling(), prefill_chunk=8, prefix_rows=0) as engine:
        for number in (0, 4):
            found = fairness.beside(engine, number, 60)
            assert found["steps"] in (8, 9)
            assert 0 < found["usual"] <= found["longest"]
            engine.check()
