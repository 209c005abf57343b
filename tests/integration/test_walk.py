"""A new user's walk in Chromium, light, dark and on a phone: the server's page, an answer, its steps, ``learn`` with
every control moved, the race, and a trace that opens on a rejection. Wherever it stops, all of it can be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace import Engine
from outpace.measure.learn import page, recorded
from outpace.measure.trace import tracing
from outpace.measure.view import write
from tests.browsing import LOOKS, faults_of, opened, started
from tests.server.serving import Running, serving

FAULTLESS: dict[str, Any] = {"pale": {}, "small": {}, "wide": []}

# Each control to its ends and its middle: those that change nothing but the number beside them, and all text that came.
_MOVE = """() => {
  const idle = [], texts = [];
  for (const panel of document.querySelectorAll("section .panel")) {
    const drawn = () =>
      [...panel.children].filter((child) => child.tagName !== "LABEL").map((child) => child.outerHTML).join();
    for (const control of panel.querySelectorAll("input, select")) {
      const range = control.type === "range", seen = new Set();
      const values = range ? [control.min, (+control.min + +control.max) / 2, control.max]
        : control.options ? [...control.options].map((option) => option.value) : ["demo", "mine.gguf"];
      for (const value of values) {
        control.value = value;
        control.dispatchEvent(new Event(control.options ? "change" : "input"));
        seen.add(drawn());
        texts.push(panel.textContent);
      }
      if (seen.size < 2) idle.push(`${panel.closest("section").id}: ${control.getAttribute("aria-label")}`);
    }
    for (const button of panel.querySelectorAll(".token, .panel > button:not(#start)")) button.click();
    texts.push(panel.textContent);
  }
  return [idle, texts.join(" ")];
}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with serving(Engine.load("demo", drafter="suffix+eagle:demo", max_length=1024), traces=4) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "acceptance": "rejection"}
    with (
        Engine.load("demo", drafter="model:demo-draft", size=4) as engine,
        tracing(engine, folder / "run.trace", probabilities=True),
    ):
        engine.generate("Describe the water cycle in a short paragraph.", **asked)
    write(folder / "run.trace", folder / "run.html")
    return folder / "run.html"


def test_the_page_of_recorded_runs_is_small() -> None:
    assert len(page(recorded()).encode()) < 300_000


@pytest.mark.parametrize("look", LOOKS)
def test_a_new_users_walk(browser: Any, served: Running, trace: Path, look: str) -> None:
    faults: list[str] = []
    shown = opened(browser, served.url + "/", faults, look)
    shown.add_init_script("localStorage.setItem('outpace.settings', JSON.stringify({max_tokens: '32'}))")
    shown.reload()
    shown.wait_for_selector("#model option", state="attached")
    assert faults_of(shown) == FAULTLESS
    shown.get_by_label("Examples").get_by_role("button").first.click()  # beside plain decoding
    shown.get_by_label("Answer again").wait_for(timeout=60_000)
    assert "Identical: " in shown.locator(".verdict").inner_text()
    assert faults_of(shown) == FAULTLESS
    shown.get_by_label("Show the steps of this answer").first.click()
    steps = shown.frame_locator("#steps")
    steps.locator("#h-step").wait_for()
    assert faults_of(steps.locator("body")) == FAULTLESS
    shown.click("#leave")

    shown.goto(shown.locator("#learn").evaluate("link => link.href"))
    learn(shown)
    shown.goto(trace.as_uri())
    assert shown.evaluate("closing(state.answer.steps[state.at])") == "recovered"
    assert "min(1, p/q)" in shown.inner_text("#decided")
    assert faults_of(shown) == FAULTLESS
    assert faults == []
    shown.close()


def learn(shown: Any) -> None:
    """All ten chapters and the race."""
    assert shown.locator("section").count() == 11
    assert shown.locator("section input, section select").count() >= 20
    for details in shown.locator("details").all():
        details.locator("summary").click()
    assert faults_of(shown) == FAULTLESS
    idle, texts = shown.evaluate(_MOVE)
    assert idle == []
    assert not [word for word in ("undefined", "NaN", "Infinity", "[object", "NOT the same") if word in texts]
    assert set(shown.locator("#who td:last-child").all_inner_texts()) == {"same"}
    assert faults_of(shown) == FAULTLESS
    assert "def reject(" in shown.inner_text("#sampling")
    for kind, words in (("yes", "only less of it in this step"), ("no", "so nothing changes")):
        shown.reload()
        shown.locator(f"#greedy button.{kind}").first.click()
        assert words in shown.inner_text("#greedy .panel > p:last-child")
    assert "a bonus token" in texts  # a draft that was accepted to its end
    clock = shown.locator("#race .lanes p").first
    begun = clock.evaluate("clock => { document.getElementById('start').click(); return clock.textContent; }")
    assert re.match(r"[0-9] of \d+ tokens", begun)  # it ends within a fifth of a second
    shown.locator("#race .lanes p", has_text=re.compile(r"^(\d+) of \1 tokens")).first.wait_for()
