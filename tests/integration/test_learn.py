"""What explains speculative decoding: the page of ``learn``, a trace with probabilities, the race. What the page
computes itself is compared with identities from the literature and with ``outpace plan``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from outpace import SamplingParams
from outpace.cli.race import Lane, _frame
from outpace.control.cost import WIDTHS, Cost
from outpace.measure.learn import page, recorded
from outpace.measure.learn.record import CODE, PROSE
from outpace.measure.plan import expected_tokens
from outpace.measure.trace import tracing
from outpace.measure.view import write
from outpace.models.demo import smollm2
from tests.browsing import opened, started
from tests.integration.test_cli import outpace
from tests.tracing import REQUESTS, engine

SETTINGS = 300  # random ones


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


def test_the_page_computes_what_theory_says(browser: Any, tmp_path: Path) -> None:
    faults: list[str] = []
    (tmp_path / "learn.html").write_text(page(recorded()), encoding="utf-8")
    shown = opened(browser, (tmp_path / "learn.html").as_uri(), faults)
    draw = np.random.default_rng(4)
    settings = [[draw.dirichlet([0.5] * 3).tolist() for _ in "pq"] for _ in range(SETTINGS)]
    settings += [[[1, 0, 0], [0, 0.5, 0.5]], [[0.2, 0.3, 0.5]] * 2]
    script = "(all) => all.map(([p, q]) => [summed(everyWay(p, q), 3), acceptanceOf(p, q)])"
    for (p, q), (total, accepted) in zip(settings, shown.evaluate(script, settings), strict=True):
        assert total == pytest.approx(p, abs=1e-12)
        assert accepted == pytest.approx(1 - np.abs(np.subtract(p, q)).sum() / 2, abs=1e-12)  # 1 - total variation
    pairs = [(round(a, 2), k) for a in np.linspace(0, 1, 11) for k in (0, 1, 4, 9)]
    tokens = shown.evaluate("(all) => all.map(([a, k]) => expectedTokens(a, k))", pairs)
    assert tokens == pytest.approx([expected_tokens(a, k) for a, k in pairs])
    for seconds in recorded()["cost"]["seconds"], [0.01] * 13:  # beyond the table, too: 72 is 8 rows of 8 and 1
        cost = Cost(seconds=tuple(seconds), widths=WIDTHS)
        widths = [1, 2, 7, 40, 64, 72, 200]
        found = shown.evaluate("([cost, all]) => all.map((n) => costOf(cost, n))", [cost.to_dict(), widths])
        assert found == pytest.approx([1e3 * cost.width(n) for n in widths])
    drawn = shown.evaluate(
        "() => { const r = randomFrom(1), n = [0, 0, 0]; "
        "for (let i = 0; i < 20000; i++) n[speculate([.5, .3, .2], [.1, .2, .7], r).token] += 1; return n; }"
    )
    assert sum((n - e) ** 2 / e for n, e in zip(drawn, (10000, 6000, 4000), strict=True)) < 20  # chi-square
    same = shown.evaluate(
        "() => runs.greedy.steps.filter((step) => step.i && !step.p).map((step) => [prefixOf(drafted(step), "
        "[-1, ...drafted(step).keys()].map((node) => places(step).get(node).choice)).gained, step.v])"
    )
    assert len(same) > 5
    assert all(found[: len(verdict)] == verdict for found, verdict in same)
    assert faults == []
    shown.close()


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_trace_shows_what_decided_and_another_k(browser: Any, tmp_path: Path, acceptance: Any) -> None:
    faults: list[str] = []
    with engine(acceptance=acceptance) as made, tracing(made, tmp_path / "run.trace", probabilities=True):
        for prompt, asked in REQUESTS[1:2]:
            made.generate_many([prompt], SamplingParams(**{**asked, "max_tokens": 30, "n": 1}))
    write(tmp_path / "run.trace", tmp_path / "run.html")
    shown = opened(browser, (tmp_path / "run.html").as_uri(), faults)
    assert shown.evaluate("closing(state.answer.steps[state.at])") == "recovered"
    wrong = shown.evaluate(
        "state.answer.steps.filter((step) => [...Array(step.kept.size + 1).keys()].some((k) => { "
        "const { tokens, drawn } = gainedWith(step, k); "
        "const all = k === step.kept.size && (drawn || tokens.length !== step.verdict.length); "
        "return all || tokens.some((token, i) => token !== step.verdict[i]); })).length"
    )
    assert wrong == 0
    text = shown.inner_text("#decided")
    assert ("log p plus noise" in text) == (acceptance == "coupled")
    assert ("min(1, p/q)" in text) == (acceptance == "rejection")
    assert (
        shown.evaluate("new Set([...document.querySelectorAll('#tree circle')].map((c) => c.getAttribute('r'))).size")
        > 1
    )
    assert faults == []
    shown.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--record", "-d", "none"), "--drafter none is recorded in any case: name what drafts"),
        (("--record", "-d", "ngram", "-d", "ngram"), "--drafter ngram is there twice: name each once"),
        (("--data", "no/such.json"), "such.json cannot be written: give a file in a folder that exists"),
        (("--data", "page.html"), "--data page.html is the page itself: give another name"),
    ],
)
def test_what_cannot_be_recorded_is_said_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...],
    said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, _, fault = outpace(capsys, "learn", "-o", "page.html", *asked)
    assert (code, said in fault) == (2, True), fault
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_here_is_what_the_model_decodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run's steps add up to its tokens, which are those that outpace generate gives; the page holds the runs."""
    monkeypatch.chdir(tmp_path)
    code, _, said = outpace(
        capsys, "learn", "--record", "-d", "ngram", "-o", "page.html", "--data", "runs.json", "--json"
    )
    assert (code, "recording 1 of 3, ngram: greedy" in said) == (0, True)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert set(runs["who"]) == {"none", "ngram"}
    assert json.dumps(runs["who"]["ngram"]["tokens"])[1:-1] in (tmp_path / "page.html").read_text().replace(",", ", ")
    _, out, _ = outpace(capsys, "generate", CODE, "-d", "none", "-n", "64", "--json")
    _, sampled, _ = outpace(capsys, "generate", PROSE, "-d", "none", "-n", "24", "-T", "0.8", "--seed", "3", "--json")
    greedy, drawn = json.loads(out)["token_ids"], json.loads(sampled)["token_ids"]
    for run in (*runs["who"].values(), runs["greedy"], runs["tree"]):
        assert run["tokens"] == greedy[: len(run["tokens"])]
    assert runs["coupled"]["tokens"] == runs["sampled"]["tokens"] == drawn
    for run in (runs["tree"], runs["coupled"], *runs["who"].values(), *runs["rejection"].values()):
        gained = [token for step in run["steps"] for token in step["v"]]
        assert gained[: len(run["tokens"])] == run["tokens"]


@pytest.mark.parametrize(
    ("columns", "name"), [(20, "plain"), (40, "plain"), (80, "suffix+eagle"), (120, "suffix+eagle:demo:")]
)
def test_a_race_fits_its_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, name: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lanes = [Lane(each, Mock(), 0, 1.5, "once upon a time " * 90, [1] * 40) for each in ("suffix+eagle:demo", "plain")]
    for height, most in ((4, 3), (9, 8), (14, 13), (15, 14), (24, 14)):  # a line is the cursor's
        monkeypatch.setenv("LINES", str(height))
        assert len(_frame(lanes)) == most
    first, *lines = _frame(lanes)
    assert name in first
    assert max(map(len, (first, *lines))) <= columns


def test_a_race_gives_both_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    smollm2()
    asked = ("-n", "8", "-T", "0.9", "--seed", "2", "--json")
    code, out, _ = outpace(capsys, "race", "Count to ten.", "-d", "ngram", *asked)
    found = json.loads(out)
    assert code == 0
    assert found["identical"] is True
    assert [lane["name"] for lane in found["lanes"]] == ["plain", "ngram"]
    code, out, _ = outpace(capsys, "generate", "Count to ten.", "-d", "none", *asked)
    assert found["lanes"][1]["text"] == json.loads(out)["text"]
