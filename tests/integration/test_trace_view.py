"""The page that shows a trace, in a headless Chromium: it is driven as a person would, and reports into its own DOM."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from outpace.cli.app import parse
from outpace.common.arrays import I32
from outpace.engine.engine import Engine
from outpace.errors import ParameterError
from outpace.measure.trace import VERSION, tracing
from outpace.measure.view import page, write
from outpace.models import load as loading
from outpace.params import SamplingParams
from tests.browsing import BROWSER, needs_browser, opened, started
from tests.integration.test_cli import outpace
from tests.toy import ToyModel
from tests.tracing import REQUESTS, VOCAB, Branches, Spelled, Swapped, engine, record

SCRIPT = (Path(__file__).parent / "trace_page_test.js").read_text(encoding="utf-8")

HOSTILE = (
    "</script><script>window.pwned=1</script>",
    "<b>bold</b><img src=x onerror=window.pwned=2>]]>--><!--",
    "\u202eabc\u2066",
    "\x00\x07\x1b[31m{{data}} {{script}}",
    "👩‍👩‍👧",
    "שלום & &amp; \\u003c",
    "مرحبا\n",
)


class HostileTokenizer(Spelled):
    """Seven tokens that nobody wants in a page."""

    def decode(self, ids: Sequence[int] | I32, *, skip_special: bool = True) -> str:
        return "".join(HOSTILE[int(i)] for i in ids)

    def token(self, token_id: int) -> str:
        return HOSTILE[token_id]


def visit(html: Path, mode: str, width: int = 1300) -> None:
    """Open the page, and fail with what it says of itself."""
    assert BROWSER is not None
    address = html.resolve().as_uri() + f"#{mode}"
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        f"--user-data-dir={html.parent / f'profile-{mode}-{width}'}", f"--window-size={width},900",
        "--virtual-time-budget=60000", "--dump-dom", address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    report = re.search(r'<pre id="selftest"([^>]*)>(.*?)</pre>', done.stdout, re.DOTALL)
    assert report is not None, done.stderr[-2000:]
    checks = unescape(report[2]).splitlines()
    assert all(line.startswith("ok") for line in checks), "\n".join(
        line for line in checks if not line.startswith("ok")
    )
    assert 'data-done="passed"' in report[1], f"it did not come to its end: {checks}"
    assert len(checks) > 20


@needs_browser
@pytest.mark.parametrize("width", [1300, 1000, 500])
def test_the_page_shows_a_run(tmp_path: Path, width: int) -> None:
    record(tmp_path / "run.trace", made=engine(size="auto"))
    write(tmp_path / "run.trace", tmp_path / "run.html", scripts=[SCRIPT])
    visit(tmp_path / "run.html", "plain", width)


def hostile(path: Path) -> None:
    model = ToyModel(VOCAB)
    with Engine(model, HostileTokenizer(), drafter=Branches(model), size=4) as made, tracing(made, path):
        made.generate([0, 1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=60, temperature=1.5, seed=3))


@needs_browser
def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile(tmp_path / "run.trace")
    write(tmp_path / "run.trace", tmp_path / "run.html", scripts=[SCRIPT])
    visit(tmp_path / "run.html", "hostile")


class Outline(HTMLParser):
    """Elements of a page, what they refer to, and the text of its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.tags.append(tag)
        self.references += [str(own[name]) for name in ("src", "href", "action", "srcset") if name in own]
        assert not [name for name in own if name.startswith("on") or name == "style"]
        if tag == "script":
            self.scripts.append((own.get("type"), ""))
        if own.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(own["content"])

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = kind, text + data


def test_the_page_holds_everything_and_refers_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "</title><script>window.pwned=3</script>.trace".replace("/", "\u2215")
    hostile(path)
    outline = Outline()
    text = page(path)
    outline.feed(text)
    assert not outline.references
    assert outline.tags.count("script") == 2
    assert not {"iframe", "img", "link", "object", "b"} & set(outline.tags) - {"b"}
    assert "default-src 'none'" in outline.policy
    assert "unsafe" not in outline.policy
    (kind, data), (_, script) = outline.scripts
    assert kind == "application/json"
    assert not set("<>&") & set(data)
    held = json.loads(data)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "request" in line:
            line["request"]["seed"] = str(line["request"]["seed"])
            line["request"]["changed"] = {}
    assert [held["header"], *held["lines"]] == lines
    assert held["cut"] is None
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")


def test_a_page_of_what_is_no_trace_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "run.trace").write_text("hello\n")
    with pytest.raises(ParameterError, match="is no trace"):
        write(tmp_path / "run.trace", tmp_path / "run.html")
    assert [path.name for path in tmp_path.iterdir()] == ["run.trace"]


@needs_browser
def test_a_trace_without_steps_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.trace").write_text(f'{{"trace": {VERSION}, "outpace": "0"}}\n')
    write(tmp_path / "run.trace", tmp_path / "run.html")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "run.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "This trace has no steps yet." in done.stdout
    assert "This trace is not whole: the run did not end" in done.stdout


def test_requests_that_did_not_run_do_not_stop_the_page(tmp_path: Path) -> None:
    """A request that was cancelled while it waited has no steps; the page lists it all the same."""
    path = tmp_path / "run.trace"
    with engine(max_rows=1) as made, tracing(made, path):
        first, second = (made.add(prompt, SamplingParams(max_tokens=4)) for prompt, _ in REQUESTS[:2])
        made.step()
        made.cancel(second)
        while not made.idle:
            made.step()
    assert f'"request":{second}' in path.read_text()
    assert f'"request":{first}' in page(path)


def test_two_traces_side_by_side_show_the_same_token(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / f"{name}.trace", made=engine(size="auto" if name == "a" else 5))
    assert parse(["trace", "view", str(tmp_path / "a.trace"), "--beside", str(tmp_path / "b.trace")])() == 0
    faults: list[str] = []
    with started() as browser:
        shown = opened(browser, (tmp_path / "a.html").as_uri(), faults)
        first, second = (shown.frames[i] for i in (1, 2))
        for frame in (first, second):
            frame.wait_for_function("document.querySelector('#h-step').textContent")
        at, steps = map(int, re.findall(r"\d+", first.inner_text("#h-step"))[:2])
        assert {"1", str(steps)} <= set(first.locator("#charts text").all_text_contents())  # the axis has numbers
        assert at == 1 + first.evaluate("telling(state.answer.steps)")
        began = first.evaluate("state.answer.steps[state.at].from")
        second.wait_for_function(f"state.answer.tokens[{began}].step === state.at")
        first.locator("#slider").fill(str(steps))
        token = first.evaluate("state.answer.steps[state.at].from")
        second.wait_for_function(f"state.answer.tokens[{token}].step === state.at")
        assert not faults


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What loading a model gives, and what was asked for."""
    given: dict[str, Any] = {"model": ToyModel(VOCAB), "asked": []}

    def load(name: str, options: object) -> tuple[ToyModel, Spelled]:
        given["asked"].append((name, options))
        return given["model"], Spelled()

    monkeypatch.setattr(loading, "load", load)
    return given


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    record(tmp_path / "run.trace", made=engine(size="auto"))
    return tmp_path / "run.trace"


def test_replay(capsys: pytest.CaptureFixture[str], served: dict[str, Any], trace: Path) -> None:
    code, out, _ = outpace(capsys, "trace", "replay", trace)
    assert code == 0
    assert "identical: " in out
    assert served["asked"][0][0] == "toy"  # the model that the header names
    code, out, _ = outpace(capsys, "trace", "replay", trace, "--model", "other", "--threads", "2", "--json")
    assert code == 0
    assert json.loads(out)["identical"] is True
    name, options = served["asked"][-1]
    assert (name, options.threads) == ("other", 2)
    served["model"] = Swapped([1, 2, 3, 4, 5], 6, by=1.5)
    code, out, _ = outpace(capsys, "trace", "replay", trace)
    assert code == 1
    assert "request 0, step 2: DIFFERENT at token 0" in out
    assert "score gap 1.5" in out
    assert "1 of 7 answers differ" in out
    served["model"] = Swapped([1, 2, 3, 4, 5], 6, by=1.5)
    code, out, _ = outpace(capsys, "trace", "replay", trace, "--json")
    assert code == 1
    assert json.loads(out)["departures"][0]["index"] == 0


def test_view(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    code, out, _ = outpace(capsys, "trace", "view", trace)
    assert code == 0
    assert str(trace.with_suffix(".html")) in out
    assert trace.with_suffix(".html").read_text().startswith("<!doctype html>")
    code, out, _ = outpace(capsys, "trace", "view", trace, "-o", tmp_path / "page.html", "--json")
    assert code == 0
    assert json.loads(out)["bytes"] == (tmp_path / "page.html").stat().st_size


def test_explain(capsys: pytest.CaptureFixture[str], served: dict[str, Any], trace: Path, tmp_path: Path) -> None:
    code, out, _ = outpace(capsys, "explain", trace, trace)
    assert code == 0
    assert out.count("identical") == 7
    assert not served["asked"]  # nothing to measure
    other = tmp_path / "other.trace"
    record(other, made=engine(model=Swapped([1, 2, 3, 4, 5], 6, by=1.5)))
    code, out, _ = outpace(capsys, "explain", trace, other)
    assert code == 1
    assert "part at token 0" in out
    assert "bug: everything is the same, gap" in out
    assert len(served["asked"]) == 1
    code, out, _ = outpace(capsys, "explain", trace, other, "--json")
    assert code == 1
    assert json.loads(out)["explanations"][0]["cause"] == "bug"
