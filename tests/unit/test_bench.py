"""The comparison itself, on a toy: order, identity, pooling, intervals, and what an interruption leaves."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outpace.cli.bench import show
from outpace.common.installing import install
from outpace.drafters.forward.model import ModelDrafter
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.engine.engine import Engine
from outpace.engine.statistics import Stats
from outpace.errors import MissingExtraError, ParameterError
from outpace.exact.noise import Noise
from outpace.measure import machine, plot
from outpace.measure.bench import CONTROL, Bench, Configuration, Run, speedup
from outpace.measure.prompts import PromptRow, encode_turns, read_prompts
from outpace.measure.same import (
    NEAR_TIE,
    Difference,
    Output,
    compare,
    difference,
    first_difference,
    gap_between,
    margins_along,
    promises_tokens,
    require_tokens,
    score_gap,
    scores_along,
)  # fmt: skip
from outpace.params import SamplingParams
from tests.toy import ToyModel, ToyTokenizer


class Tokenizer(ToyTokenizer):
    """The toy's, for texts of more than its letters: each character is taken modulo the vocabulary."""

    def encode(self, text: str, **_: object) -> np.ndarray:
        return np.array([ord(c) % 11 for c in text], np.int32)


ROWS = [
    PromptRow("1", "odd", ("abcab", "more")),
    PromptRow("2", "even", ("bcde",)),
    PromptRow("3", "odd", ("hello", "again", "stop")),
]


def bench_of(*, all_turns: bool = False, wrong: bool = False) -> Bench:
    """none, ngram and a draft model over one toy. ``wrong``: the last has another target, so its tokens differ."""
    target = ToyModel(max_length=512)
    drafters = [None, NgramDrafter(), ModelDrafter(ToyModel(blur=0.3, max_length=512), "model:toy", 11)]
    engines = [Engine(target, Tokenizer(), drafter=drafter, size=3) for drafter in drafters]
    if wrong:
        engines[-1] = Engine(ToyModel(seed=5, max_length=512), Tokenizer())
    named = [Configuration(name, engine) for name, engine in zip(("none", "ngram", "model"), engines, strict=True)]
    return Bench(named, SamplingParams(max_tokens=12, seed=4, temperature=0.9), all_turns)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_every_prompt_runs_under_every_configuration_in_turn(concurrency: int) -> None:
    bench = bench_of()
    through: list[int] = []
    bench.run(ROWS, concurrency, through.append)
    assert sum(through) == 3
    assert len(bench.runs) == 9
    if concurrency == 1:
        assert [(r.prompt.id, r.configuration) for r in bench.runs] == [
            (row.id, name) for row in ROWS for name in ("none", "ngram", "model")
        ]
    assert all(run.difference is None for run in bench.runs)
    for configuration in bench.configurations:
        assert configuration.engine.idle


def test_the_report_has_the_promised_fields_and_pools_them() -> None:
    bench = bench_of()
    bench.run(ROWS, 1, lambda n: None)
    plain, ngram, model = bench.report()
    assert [e["drafter"] for e in (plain, ngram, model)] == ["none", "ngram", "model:toy"]
    assert [e["size"] for e in (plain, ngram, model)] == [0, 3, 3]
    assert plain["speedup"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    for entry in (ngram, model):  # the one definition: of the speeds beside it
        speeds = [its["decode_tokens_per_second"] for its in (plain, entry)]
        assert entry["speedup"]["ratio"] == pytest.approx(speeds[1] / speeds[0])
    assert len(model["acceptance_by_position"]) == 3
    assert model["acceptance_rate"] > 0.1
    assert model["tokens_per_step"] > plain["tokens_per_step"] == 1.0
    for entry in (plain, ngram, model):
        assert entry["prompts"] == entry["identical"] == 3
        assert entry["tokens"] == 36
        assert set(entry["by_category"]) == {"odd", "even"}
        assert [entry["by_category"][c]["prompts"] for c in ("odd", "even")] == [2, 1]
        assert sum(c["tokens"] for c in entry["by_category"].values()) == entry["tokens"]
        missing = set(entry["by_category"]["odd"]) ^ (set(entry) - {"name", "drafter", "size", "acceptance"})
        assert missing == {"by_category", "without_loops"}
    steps = sum(r.result.stats.steps for r in bench.runs if r.configuration == "model")
    assert model["tokens_per_step"] == 36 / steps
    json.dumps([run.to_dict() for run in bench.runs], allow_nan=False)


def test_later_turns_continue_the_first_configurations_conversation() -> None:
    bench = bench_of(all_turns=True)
    bench.run(ROWS, 2, lambda n: None)
    assert len(bench.runs) == 3 * (2 + 1 + 3)
    by_turn = [
        (r.prompt.id, r.turn, r.result.prompt_tokens, r.result.token_ids)
        for r in bench.runs
        if r.configuration == "none"
    ]
    assert sorted((i, turn) for i, turn, _, _ in by_turn) == [(i.id, t) for i in ROWS for t in range(len(i.turns))]
    lengths = {(i, turn): n for i, turn, n, _ in by_turn}
    assert lengths["3", 0] < lengths["3", 1] < lengths["3", 2]
    assert all(run.difference is None for run in bench.runs)  # all configurations answered the same prompts


def test_a_configuration_that_says_something_else_is_found_out() -> None:
    bench = bench_of(wrong=True)
    bench.run(ROWS, 1, lambda n: None)
    entry = bench.report()[-1]
    assert entry["identical"] == entry["near_ties"] == 0
    assert all(r.difference is not None for r in bench.runs if r.configuration == "model")


def test_an_interruption_leaves_whole_comparisons() -> None:
    bench = bench_of()

    def stop(_: int) -> None:
        if len(bench.runs) == 6:
            bench.configurations[-1].engine.model.fail = "forward"  # type: ignore[attr-defined]

    with pytest.raises(Exception, match="told to fail"):
        bench.run(ROWS, 1, stop)
    assert [run.prompt.id for run in bench.runs] == ["1"] * 3 + ["2"] * 3
    assert [entry["prompts"] for entry in bench.report()] == [2, 2, 2]


def test_a_prompt_that_does_not_fit_is_refused_before_the_run() -> None:
    bench = bench_of()
    with pytest.raises(ParameterError, match="prompt long has 600 tokens"):
        bench.run([*ROWS, PromptRow("long", "odd", ("a" * 600,))], 1, lambda n: None)
    assert bench.runs == []
    assert bench.configurations[0].engine.model.forwards == []  # type: ignore[attr-defined]


def run_of(name: str, tokens: int, steps: int, seconds: float) -> Run:
    """One measured answer of so many tokens, the first of which came with the first delta."""
    stats = Stats(tokens=tokens + 1, first_delta_tokens=1, steps=steps + 1, decode_seconds=seconds)
    result: Any = SimpleNamespace(stats=stats)
    return Run(ROWS[0], 0, name, result, seconds, None)


def stats_of(pairs: list[tuple[int, float]]) -> list[Stats]:
    return [run_of("none", tokens, tokens, seconds).result.stats for tokens, seconds in pairs]


def test_speedup_is_the_ratio_of_pooled_speeds_with_its_interval() -> None:
    before, after = stats_of([(10, 1.0), (30, 2.0), (20, 2.0)]), stats_of([(10, 0.5), (30, 2.0), (20, 1.0)])
    found = speedup(before, after)
    assert found["ratio"] == pytest.approx((60 / 3.5) / (60 / 5))
    assert found["low"] is not None
    assert found["high"] is not None
    assert 1.0 <= found["low"] < found["ratio"] < found["high"] <= 2.0
    assert speedup(before, after) == found  # the same bootstrap every time
    assert speedup(before[:1], after[:1]) == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert speedup(before + stats_of([(0, 0.0)]), after + stats_of([(0, 0.0)]))["ratio"] == found["ratio"]
    for nothing in ([], stats_of([(0, 0.0)])):
        assert speedup(nothing, nothing) == {"ratio": None, "low": None, "high": None}


def test_a_ratio_above_tokens_a_step_is_not_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    bench = bench_of()
    bench.control = True
    times = {"none": 2.0, "ngram": 1.0, "model": 0.5, CONTROL: 1.6}
    bench.runs = [run_of(name, 20, 20 if name in ("none", CONTROL) else 10, t) for name, t in times.items()]
    assert [entry["moved"] for entry in bench.report()] == [False, True, True]  # 21 tokens in 11 steps are below 2
    head = {"model": "toy", "backend": "native", "dtype": "q", "threads": 1, "max_tokens": 9, "temperature": 0.0}
    value = {**head, "acceptance": "coupled", "configs": bench.report(), "control": bench.figures(CONTROL), "runs": []}
    show(value, promised=True)
    out = capsys.readouterr().out
    assert "4.00x!" in out
    assert "model's 4.000x is more than 1.909 tokens a step can give: the machine moved" in out
    assert "none against none, as a control: 1.25x" in out
    bench.runs[1] = run_of("ngram", 20, 10, 1.2)
    assert not bench.report()[1]["moved"]


def test_figures_are_given_without_answers_that_end_in_a_loop_too(capsys: pytest.CaptureFixture[str]) -> None:
    bench = bench_of()
    looping = [
        run_of(name, 40, steps, seconds)
        for name, steps, seconds in (("none", 40, 4.0), ("ngram", 5, 0.5), ("model", 5, 1.0))
    ]
    for run in looping:
        run.loop = 30
    bench.runs = looping
    assert bench.report()[1]["without_loops"]["speedup"]["ratio"] is None  # there is no other answer
    bench.runs = [*looping, *(run_of(name, 20, 10, 1.0) for name in ("ngram", "model")), run_of("none", 20, 20, 2.0)]
    (_, with_all, *_) = bench.report()
    assert (with_all["looping"], with_all["loop_tokens"], with_all["prompts"]) == (1, 30, 2)
    assert with_all["speedup"]["ratio"] == pytest.approx(4.0)
    assert with_all["without_loops"]["speedup"]["ratio"] == pytest.approx(2.0)
    head = {"model": "toy", "backend": "native", "dtype": "q", "threads": 1, "max_tokens": 9, "temperature": 0.0}
    configs = [entry for entry in bench.report() if entry["name"] != "model"]
    show({**head, "acceptance": "coupled", "configs": configs, "control": configs[0], "runs": []}, promised=True)
    out = capsys.readouterr().out
    assert "loops at the end of answers: 1 of 2 answers, 30 of 62 tokens" in out
    assert "without these answers: ngram 2.00x, 1.91 tokens/step" in out


@pytest.mark.parametrize("columns", [40, 80, 132])
def test_bars_are_as_long_as_speeds_and_their_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """In what room there is, to a character; names that are longer are cut, and a table loses columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    bench = bench_of()
    bench.configurations = bench.configurations[:2]
    bench.runs = [
        run_of(name, 20, 10, seconds + i / 4) for i in range(3) for name, seconds in (("none", 2.0), ("ngram", 1.0))
    ]
    configs = bench.report()
    configs[1]["name"] = "ngram:min=2,max=5,and=much,more"
    head = {"model": "toy", "backend": "native", "dtype": "q", "threads": 1, "max_tokens": 9, "temperature": 0.0}
    show({**head, "acceptance": "coupled", "configs": configs, "control": configs[0], "runs": []}, promised=True)
    out = capsys.readouterr().out
    assert out.isascii()
    assert ("end-to-end  tokens/step" in out) is (columns == 132)
    drawn = [re.fullmatch(r"(?:all|   )  (\S+ *)  (#*)(-*)\|(-*) +([\d.]+)", line) for line in out.splitlines()]
    plain, drafted = [line for line in drawn if line is not None]
    assert (plain[1].strip(), drafted[1]) == ("none", "ngram:min=2,max=5,and=..")
    ratio = configs[1]["speedup"]
    speeds = [ratio[end] * float(plain[5]) for end in ("low", "ratio", "high")]
    assert plain[3] == plain[4] == ""
    assert float(drafted[5]) == pytest.approx(speeds[1], rel=0.02)
    room = max(columns - 40, 8)
    lengths = [len(drafted[2]) + 1, len(drafted[2] + drafted[3]) + 1, len(drafted[2] + drafted[3] + drafted[4]) + 1]
    assert lengths == pytest.approx([room * speed / speeds[2] for speed in speeds], abs=1)
    assert max(len(line) for line in out.splitlines() if "|" in line) <= max(columns, 48)


def test_the_examples_are_24_in_six_categories_and_the_default() -> None:
    rows = read_prompts(None)
    assert len({row.id for row in rows}) == len(rows) == 24
    assert set(Counter(row.category for row in rows).values()) == {4}
    assert len({row.category for row in read_prompts(None, limit=6)}) == 6


def test_the_control_is_the_first_configuration_again() -> None:
    bench = bench_of()
    bench.control = True
    bench.run(ROWS[:2], 2, lambda n: None)
    assert [run.configuration for run in bench.runs[::2]] == ["none", "ngram", "model", CONTROL]
    assert [entry["name"] for entry in bench.report()] == ["none", "ngram", "model"]
    assert bench.figures(CONTROL)["tokens"] == bench.report()[0]["tokens"]


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_a_plot_has_every_drafter_and_category(tmp_path: Path, name: str) -> None:
    from matplotlib import rc_context

    bench = bench_of()
    bench.run(ROWS, 1, lambda n: None)
    value = {"model": "toy", "backend": "native", "dtype": "q4", "configs": bench.report()}
    plot.check(tmp_path / name)
    with rc_context({"svg.fonttype": "none"}):  # text as text
        plot.draw(tmp_path / name, value)
    data = (tmp_path / name).read_bytes()
    if name.endswith(".png"):
        assert data.startswith(b"\x89PNG")
    else:
        assert all(f">{text}</text>".encode() in data for text in ("odd", "even", "all", "none", "ngram", "model", "3"))
        assert [data.count(f">n = {n}</text>".encode()) for n in (3, 2, 1)] == [1, 1, 1]  # all, odd, even


def test_a_plot_that_cannot_be_drawn_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParameterError, match=r"neither a \.png nor an \.svg"):
        plot.check(tmp_path / "out.gif")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"a plot needs matplotlib: {re.escape(install('outpace[plot]'))}"):
        plot.check(tmp_path / "out.png")


def test_prompts_from_a_table(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text('\ufeffid,category,prompt,system\na,c,"One, two.\nThree.",\n,,Four.,Be brief.\n', encoding="utf-8")
    said = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Four."})
    assert read_prompts(path) == [
        PromptRow("a", "c", ("One, two.\nThree.",)), PromptRow("2", "all", ("Four.",), messages=said),
    ]  # fmt: skip
    for text, says in (
        ("text\nHello.\n", "no column prompt, but text"),
        ("", "no column prompt, but nothing"),
        ('prompt\n"open\n', "unexpected end of data: this is no CSV file"),
        ("prompt,id\n,7\n", "line 2: needs turns"),
        ("prompt\nHello, you.\n", "line 2: more cells than columns"),
    ):
        path.write_text(text)
        with pytest.raises(ParameterError, match=says):
            read_prompts(path)


def test_rows_are_spread_evenly_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": "x"}) + "\n" for i in range(240)))
    assert [row.id for row in read_prompts(path, 4)] == ["0", "60", "120", "180"]
    assert len({row.id for row in read_prompts(path, 239)}) == 239
    assert len(read_prompts(path, 999)) == len(read_prompts(path)) == 240


def test_prompts_of_every_shape_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n\n{"id": 7, "category": "c", "turns": ["x", "y"]}\n', encoding="utf-8")
    assert read_prompts(path) == [PromptRow("1", "all", ("a\u2028b",)), PromptRow("7", "c", ("x", "y"))]


def test_a_row_that_cannot_be_encoded_is_named() -> None:
    class Refusing(ToyTokenizer):
        def encode(self, text: str, **_: object) -> np.ndarray:
            raise ParameterError("the text is not valid Unicode")

    with pytest.raises(ParameterError, match="prompt 9: the text"):
        encode_turns(Engine(ToyModel(), Refusing()), PromptRow("9", "all", ("x",)))


PROMPT = np.array([1, 2, 3, 4], np.int32)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [7], 0), ([5, 1], [6, 1], 0)],
)
def test_first_difference(a: list[int], b: list[int], expected: int | None) -> None:
    assert first_difference(a, b) == expected
    assert first_difference(b, a) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3, max_tokens=9),
        SamplingParams(seed=3, max_tokens=9, temperature=0.8, top_k=6, repetition_penalty=1.3),
    ],
)
def test_replayed_scores_choose_what_decoding_chose(params: SamplingParams) -> None:
    """Rules, filters, noise and the output index are those of the run itself."""
    engine = Engine(ToyModel())
    result = engine.generate(PROMPT.tolist(), params)
    for first in (0, 4, 9):
        along = list(scores_along((engine.model, None), PROMPT, result.token_ids, params, Noise(3), first))
        assert [int(scores.argmax()) for scores in along[:-1]] == list(result.token_ids[first:])
    assert min(margins_along((engine.model, None), PROMPT, result.token_ids, params, Noise(3))) > 0
    assert engine.model.kv.rows == []  # it leaves nothing behind


def test_a_gap_is_measured_from_the_best_score() -> None:
    target = ToyModel(), None
    params, noise = SamplingParams(seed=0), Noise(0)
    (scores,) = scores_along(target, PROMPT, [], params, noise)
    best, second, third = (int(i) for i in np.argsort(-scores)[:3])
    assert score_gap(target, PROMPT, [], (best, second), params, noise) == scores[best] - scores[second]
    # Two that are equal to each other but far from the best are no near-tie.
    assert gap_between(scores, (third, third)) == scores[best] - scores[third] > NEAR_TIE


def test_identical_near_tie_and_different() -> None:
    class Close(ToyModel):
        """Tokens 4 and 5 are nearly equal, and far above the rest."""

        def logits_after(self, prefix: list[int], layers: int | None = None) -> np.ndarray:
            logits = super().logits_after(prefix).copy()
            logits[4], logits[5] = 50.0, 50.0 - 1e-4
            return logits

    engine = Engine(Close())
    params, noise = SamplingParams(seed=0), Noise(0)
    assert compare(engine, PROMPT, params, noise, [4, 4], [4, 4]) is None
    tie = compare(engine, PROMPT, params, noise, [4, 4, 4], [4, 5, 4])
    assert tie is not None
    assert tie.near_tie
    assert (tie.what, tie.index, tie.values) == ("token", 1, (4, 5))
    assert str(tie).startswith("near-tie at token 1 (4 / 5, score gap ")
    bug = compare(engine, PROMPT, params, noise, [4, 4], [4, 6])
    assert bug is not None
    assert not bug.near_tie
    assert "DIFFERENT at token 1" in str(bug)


def test_an_output_that_ended_early_is_no_near_tie() -> None:
    ended = compare(Engine(ToyModel()), PROMPT, SamplingParams(seed=0), Noise(0), [4, 4, 4], [4, 4, 4, 7])
    assert ended == Difference("token", 3, (None, 7))
    assert not ended.near_tie
    assert str(ended) == "DIFFERENT at token 3 (ended / 7)"


@pytest.mark.parametrize("gap", [math.inf, math.nan, None])
def test_a_difference_is_valid_json(gap: float | None) -> None:
    written = json.dumps(Difference("token", 2, (4, 3), gap).to_dict(), allow_nan=False)
    assert json.loads(written) == {"what": "token", "index": 2, "gap": None, "tokens": [4, 3], "near_tie": False}


def test_a_filtered_token_is_no_near_tie() -> None:
    target, params = (ToyModel(), None), SamplingParams(seed=0, temperature=1.0, top_k=1)
    (scores,) = scores_along(target, PROMPT, [], params, Noise(0))
    tokens = int(np.argmin(scores)), int(np.argmax(scores))
    assert score_gap(target, PROMPT, [], tokens, params, Noise(0)) == math.inf


def test_what_is_known_of_both_is_compared_and_nothing_else() -> None:
    answer = Output((1, 2), "bc", (-0.5, -0.25), "stop")
    assert difference(answer, answer) is difference(answer, Output()) is None
    for other, what, index, values, text in [
        (Output((1, 3), "bx", (-0.5, -9.0), "length"), "token", 1, (2, 3), "DIFFERENT at token 1 (2 / 3)"),
        (Output(None, "bx", None, "length"), "text", 1, ("c", "x"), "DIFFERENT at character 1 ('c' / 'x')"),
        (Output((1, 2), None, (0.0,), "length"), "finish", 2, ("stop", "length"), "finish DIFFERENT at token 2"),
        (Output((1, 2), None, (-0.5, 0.0)), "logprob", 1, (-0.25, 0.0), "logprob DIFFERENT at token 1 (-0.25 / 0.0)"),
    ]:
        found = difference(answer, other)
        assert found == Difference(what, index, values)
        assert str(found).startswith(text)
    assert not Difference("logprob", 1, (-0.25, -0.25001), 1e-5).near_tie  # the tokens are the same: no tie decided


def test_only_what_was_promised_is_compared() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0)
    assert promises_tokens("coupled", sampled)
    assert all(promises_tokens(rule, greedy) for rule in ("coupled", "rejection"))
    with pytest.raises(ParameterError, match="promises the same distribution, not the same tokens"):
        require_tokens("rejection", sampled)


def test_energy_is_read_where_the_processor_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By packages; their parts, which are in them, do not count."""
    assert machine.joules(tmp_path) is None
    for name, used in (("intel-rapl:0", 7_000_000), ("intel-rapl:0:0", 5_000_000), ("intel-rapl:1", 2_500_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{used}\n")
    assert machine.joules(tmp_path) == 9.5
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("not a number")
    assert machine.joules(tmp_path) is None
    readings = iter([10.0, 14.0, 20.0, 21.0, 30.0, 5.0])  # the last counter began anew
    monkeypatch.setattr(machine, "joules", lambda: next(readings))
    engine = Engine(ToyModel(max_length=512), Tokenizer())
    bench = Bench([Configuration("none", engine)], SamplingParams(max_tokens=4, ignore_eos=True))
    bench.run(ROWS, 1, lambda n: None)
    assert [run.joules for run in bench.runs] == [4.0, 1.0, None]
    assert bench.figures("none")["joules_per_token"] is None
    assert bench.figures("none", "even")["joules_per_token"] == 0.25
