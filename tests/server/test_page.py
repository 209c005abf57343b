"""The page in headless Chromium: what it shows is what the server says, and nothing else is fetched."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from outpace import Engine
from outpace.server.engines.generation import Observer
from outpace.server.errors import APIError
from tests import fake_hub
from tests.browsing import faults_of, started
from tests.native.native_helpers import Tiny
from tests.server.serving import Running, serving

KEY = "a-key-of-the-tests"


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with serving(Engine.load("demo", drafter="ngram+suffix", max_length=1024), traces=4, api_keys=(KEY,)) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started("--host-resolver-rules=MAP rebound.example 127.0.0.1") as found:
        yield found


@pytest.fixture
def page(served: Running, browser: Any) -> Iterator[Any]:
    """The page with its key, and few tokens an answer; every request that leaves the server, and every fault, fails."""
    context = browser.new_context()
    context.add_init_script(
        f"sessionStorage.setItem('outpace.key', '{KEY}');"
        "if (!localStorage.getItem('outpace.settings'))"
        " localStorage.setItem('outpace.settings', JSON.stringify({max_tokens: '24'}));"
    )
    faults: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: faults.append(str(error)))
    told = "with a status of 400"  # a refusal, which the page shows and the browser mentions
    opened.on(
        "console",
        lambda its: faults.append(its.text) if its.type == "error" and told not in its.text else None,
    )
    opened.on("request", lambda its: None if its.url.startswith((served.url, "data:")) else faults.append(its.url))
    opened.goto(served.url + "/")
    opened.wait_for_selector("#model option", state="attached")
    yield opened
    context.close()
    served.at_rest()
    assert not faults


def said(page: Any, text: str) -> Any:
    """The answer to ``text``, once it is there."""
    before = page.locator("article.assistant").count()
    page.fill("#text", text)
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant").nth(before)
    answer.get_by_label("Answer again").wait_for(timeout=60_000)  # there once it is done
    return answer


def get(served: Running, path: str, **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(served.url + path, headers=headers), timeout=30)


def test_the_page_needs_no_key_and_lets_run_only_itself(served: Running) -> None:
    with get(served, "/") as answer:
        policy = answer.headers["content-security-policy"]
        text = answer.read().decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "http" not in text.replace("http-equiv", "")
    for name in ("app.js", "style.css", "colours.css", "steps", "about"):
        with get(served, f"/page/{name}") as answer:
            assert answer.read()
    with get(served, "/page/app.js") as answer:
        tag = answer.headers["etag"]
    with pytest.raises(urllib.error.HTTPError, match="304"):
        get(served, "/page/app.js", **{"if-none-match": tag})
    for path, status in (("/page/..%2Fapp.py", "404"), ("/page/index.py", "404"), ("/v1/traces/x", "401")):
        with pytest.raises(urllib.error.HTTPError, match=status):
            get(served, path)


def test_no_script_writes_markup() -> None:
    from importlib import resources

    for part in (resources.files("outpace.server") / "page").iterdir():
        text = part.read_text(encoding="utf-8")
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert forbidden not in text, (part.name, forbidden)


def test_a_chat_is_what_the_api_says(served: Running, page: Any) -> None:
    text = "<b>Count</b> to ten, twice. <img src=x onerror=alert(1)>"
    answer = said(page, text)
    assert page.locator("article.user .said").inner_text() == text
    expected = (
        served.client()
        .with_options(api_key=KEY)
        .chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], max_tokens=24, temperature=0
        )
    )
    content = expected.choices[0].message.content
    assert content is not None
    assert expected.usage is not None
    shown = "".join(answer.locator(".prose, pre").evaluate_all("all => all.map(its => its.textContent)"))
    plain = re.sub(r"^```.*$", "", content, flags=re.MULTILINE)  # fences are drawn, not shown
    assert shown.replace("\n", "") == plain.replace("\n", "")
    assert f"{expected.usage.completion_tokens} tokens" in answer.locator(".figures").inner_text()
    page.reload()
    page.wait_for_selector("article.assistant")
    assert page.locator("article.user .said").inner_text() == text
    assert page.locator("#list button").first.inner_text() == text


def test_side_by_side_again_edit_and_steps(page: Any) -> None:
    page.check("#both")
    answer = said(page, "Repeat: one two three, one two three, one two three, one two three.")
    assert answer.locator(".columns section").count() == 2
    assert "Identical: " in answer.locator(".verdict").inner_text()
    plain, fast = answer.locator(".said").all_inner_texts()
    assert plain == fast
    assert answer.locator("section").nth(0).locator(".said span").count() == 0
    page.uncheck("#both")
    answer.get_by_label("Answer again").click()
    page.wait_for_selector("#send", state="visible", timeout=60_000)
    page.wait_for_selector(".acts [aria-label='Answer again']")
    assert page.locator("article").count() == 2
    assert page.locator("article.assistant .said").inner_text() == fast
    page.get_by_label("Show the steps of this answer").click()
    steps = page.frame_locator("#steps")
    steps.locator("#h-step").wait_for()
    assert steps.locator("#pieces").evaluate("its => its.textContent.trim().length") > 0
    assert steps.locator("#cut").is_hidden()
    page.click("#leave")
    page.get_by_label("Edit the message and ask again").click()
    page.fill(".editing textarea", "Say hello.")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible", timeout=60_000)
    page.wait_for_selector(".acts [aria-label='Answer again']")
    assert page.locator("article.user .said").all_inner_texts() == ["Say hello."]


def test_an_empty_chat_offers_examples_beside_plain_decoding(page: Any) -> None:
    page.get_by_label("Examples").get_by_role("button").first.click()
    answer = page.locator("article.assistant")
    answer.get_by_label("Answer again").wait_for(timeout=60_000)
    assert answer.locator(".columns section").count() == 2
    assert "Identical: 24 tokens" in answer.locator(".verdict").inner_text()
    page.click("#new")
    answer = said(page, "Repeat: one two three, one two three, one two three, one two three.")
    assert "The model ran" in answer.locator(".why").inner_text()
    legend = page.locator("#legend").inner_text()
    assert "no colour: the model itself" in legend
    assert {"ngram", "suffix"} <= set(re.findall(r"\w+", legend))
    answer.get_by_label("Ask again, beside plain decoding").click()
    answer.locator(".verdict").wait_for(timeout=60_000)
    assert answer.locator(".columns section").count() == 2


def tell_long(page: Any) -> None:
    """An answer that takes a while has begun."""
    page.click("#settings")
    page.fill("#max_tokens", "800")
    page.click("#close")
    page.fill("#text", "Write a very long story about the sea.")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant .figures:has-text('tokens/s')", timeout=60_000)


def test_stop_frees_the_row(page: Any) -> None:
    tell_long(page)
    page.keyboard.press("Escape")
    page.wait_for_selector("#send", state="visible")
    assert "stopped" in page.locator("article.assistant .figures").inner_text()


def test_a_refusal_is_shown_and_nothing_lacks_a_name(page: Any) -> None:
    page.click("#settings")
    page.fill("#seed", "9" * 30)
    page.click("#close")
    assert "seed" in said(page, "Hello").locator(".error").inner_text()
    page.evaluate("document.querySelectorAll('details').forEach(its => { its.open = true })")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea, select')].filter(its => !its.textContent.trim()"
        " && !its.getAttribute('aria-label') && !(its.labels && its.labels.length)).map(its => its.id)"
    )
    assert unnamed == []
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.click("#chats")
    assert page.locator("#new").is_visible()


UNDER = """() => {
  const header = document.querySelector("header").getBoundingClientRect();
  const found = [];
  for (let x = header.left + 2; x < header.right; x += 8)
    for (let y = header.top + 2; y < header.bottom; y += 8)
      if (!document.elementFromPoint(x, y).closest("header")) found.push([x, y]);
  for (const each of document.querySelectorAll("#app, #side, main, main > *")) {
    const { top, bottom, height, width } = each.getBoundingClientRect();
    if (height > 1 && width > 1 && (top < header.bottom - 0.5 || bottom > innerHeight + 0.5)) found.push(each.id);
  }
  return found;
}"""


@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800)])
def test_nothing_lies_under_the_header(page: Any, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    assert page.evaluate(UNDER) == []
    page.get_by_label("Examples").get_by_role("button").first.click()
    page.get_by_label("Answer again").wait_for(timeout=60_000)
    for place in (0, 10_000):
        page.locator("#messages").evaluate("(its, place) => { its.scrollTop = place }", place)
        assert page.evaluate(UNDER) == []
    page.click("#system summary")
    assert page.evaluate(UNDER) == []
    if width == 360:
        page.click("#chats")
        assert page.evaluate("document.querySelector('#side').getBoundingClientRect().top") >= page.evaluate(
            "document.querySelector('header').getBoundingClientRect().bottom"
        )
    page.click("#settings")
    panel = page.locator("#panel").bounding_box()
    assert panel["x"] >= 0
    assert panel["y"] >= 0
    assert panel["x"] + panel["width"] <= width
    assert panel["y"] + panel["height"] <= height


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_light_and_dark(page: Any, scheme: str) -> None:
    """WCAG's contrast of 4.5, in the system's colours and in those that the button switches to."""
    page.emulate_media(color_scheme=scheme)
    said(page, "Repeat: one two three, one two three, one two three, one two three.")
    page.evaluate("document.querySelectorAll('details').forEach(its => { its.open = true })")
    paper = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).every(its => its < 60)"
    for dark in (scheme == "dark", scheme != "dark"):
        assert page.evaluate(paper) is dark
        for opened, closed in (("#system summary", "#system summary"), ("#settings", "#close")):
            page.click(opened)
            assert faults_of(page)["pale"] == {}
            page.click(closed)
        page.click("#theme")
        page.get_by_label("Show the steps of this answer").click()
        steps = page.frame_locator("#steps")
        steps.locator("#h-step").wait_for()
        assert steps.locator("body").evaluate(f"() => {paper}") is not dark
        assert faults_of(steps.locator("body"))["pale"] == {}
        page.click("#leave")


def focused(page: Any) -> Any:
    return page.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')")


def reached(page: Any, name: str, backwards: bool = False) -> None:
    """Go on with Tab until what is called so has the focus."""
    for _ in range(40):
        if focused(page) == name:
            return
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
    raise AssertionError(f"the keyboard does not come to {name!r}, but to {focused(page)!r}")


def test_by_keyboard_alone(page: Any) -> None:
    """Ask, ask again, edit, see the steps, change a setting and the chat; the focus is never lost."""
    assert focused(page) == "text"
    page.keyboard.type("Count to three.")
    page.keyboard.press("Enter")
    page.get_by_label("Answer again").wait_for(timeout=60_000)
    assert focused(page) == "text"
    reached(page, "Answer again", backwards=True)
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible", timeout=60_000)
    assert focused(page) == "messages"
    reached(page, "Show the steps of this answer")
    page.keyboard.press("Enter")
    steps = page.frame_locator("#steps")
    steps.locator("#h-step").wait_for()
    drafters = page.evaluate("JSON.parse(sessionStorage.getItem('outpace.drafters'))")
    for name in page.locator("#legend span").all_inner_texts():  # one drafter, one colour, in both
        there = steps.locator("#legend span", has_text=name)
        if there.count():  # what paid for the first answer may not have been asked for the second
            assert there.get_attribute("class") == f"s{drafters.index(name)}"
    steps.locator("#forth").focus()
    page.keyboard.press("Escape")
    page.wait_for_selector("#viewer", state="hidden")
    reached(page, "text")
    page.keyboard.press("ArrowUp")
    assert focused(page) == "Edit the message"
    page.keyboard.press("Escape")
    assert focused(page) == "text"
    reached(page, "settings", backwards=True)
    page.keyboard.press("Enter")
    assert focused(page) == "temperature"
    page.keyboard.press("Escape")
    assert focused(page) == "settings"
    page.keyboard.press("Alt+n")
    assert focused(page) == "text"
    assert page.locator("article").count() == 0


def test_what_is_kept_survives(page: Any) -> None:
    """An answer that a reload cuts off, a system prompt, and a chat that lost its colours for want of room."""
    page.click("#system summary")
    page.fill("#system-text", "You are brief.")
    tell_long(page)
    while len(page.locator("article.assistant .said").inner_text()) < 500:  # colours enough to make room
        page.wait_for_timeout(100)
    page.reload()
    page.wait_for_selector("article.assistant .figures:has-text('stopped')")
    assert len(page.locator("article.assistant .said").inner_text()) > 3
    assert page.locator("#system-text").input_value() == "You are brief."
    page.click("#settings")
    page.fill("#max_tokens", "8")
    page.click("#close")
    page.evaluate(
        """async () => {
          const { keepChats } = await import("/page/store.js");
          const chats = JSON.parse(localStorage.getItem("outpace.chats"));
          let length = 1 << 24;  // fill what room there is, but for a few characters
          for (let kept = ""; length >= 1; length >>= 1) {
            try { localStorage.setItem("other", kept + "x".repeat(length)); kept += "x".repeat(length); } catch { }
          }
          const grown = { ...chats[0], id: "new", title: "Newer", messages: [] , system: "y".repeat(50) };
          keepChats([grown, ...chats]);
          localStorage.removeItem("other");
        }"""
    )
    assert [its["title"] for its in kept_chats(page)] == ["Newer", "Write a very long story about the sea."]
    page.reload()
    page.locator("#list button", has_text="Write a very long").first.click()
    assert len(page.locator("article.assistant .said").inner_text()) > 3
    assert page.locator("article.assistant .said span").count() == 0
    assert "tokens" in said(page, "And then?").locator(".figures").inner_text()


def test_two_tabs_keep_each_others_chats(page: Any) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("#model option", state="attached")
    said(page, "The first tab.")
    other.wait_for_selector("#list button:has-text('The first tab.')", timeout=10_000)
    said(other, "The second tab.")
    page.wait_for_selector("#list button:has-text('The second tab.')", timeout=10_000)
    other.close(run_before_unload=True)
    said(page, "Once more.")
    page.reload()
    assert [its["title"] for its in kept_chats(page)] == ["The second tab.", "The first tab."]
    page.click("#list button:has-text('The first tab.')")
    page.locator("article.user").nth(1).wait_for(timeout=10_000)
    assert page.locator("article.user").count() == 2


def kept_chats(page: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate("JSON.parse(localStorage.getItem('outpace.chats'))")
    return found


class Codes(Observer):
    """Of the requests that were refused."""

    def __init__(self) -> None:
        self.found: list[str | None] = []

    def refused(self, error: APIError) -> None:
        self.found.append(error.code)


def test_pages_of_other_origins_and_names_made_to_mean_this_machine_get_no_answer(browser: Any) -> None:
    codes = Codes()
    post = """async ([url, type]) => {
        const body = JSON.stringify({prompt: "a", max_tokens: 1});
        await fetch(url, {method: "POST", mode: "no-cors", headers: {"content-type": type}, body});
        return await fetch(url).then(() => "read", () => "not read");
    }"""
    with (
        Tiny() as tiny,
        serving(Engine.load(str(tiny.path("Q8_0", layers=1, tokenizer=1, vocab=180))), observers=[codes]) as running,
        fake_hub.serving(lambda request: fake_hub.send(request, b"<title>elsewhere</title>")) as elsewhere,
    ):
        page = browser.new_page()
        page.goto(elsewhere)
        for kind in ("text/plain", "application/json"):
            assert page.evaluate(post, [f"{running.url}/v1/completions", kind]) == "not read"
        assert codes.found == ["origin_not_allowed"] * 4
        rebound = page.goto(running.url.replace("127.0.0.1", "rebound.example"))
        assert rebound.status == 403
        assert page.evaluate("fetch('/v1/models').then(answer => answer.status)") == 403
        assert set(codes.found[4:]) == {"host_not_allowed"}
        assert running.service.came == 0
        assert page.goto(running.url.replace("127.0.0.1", "localhost")).status == 200
        page.close()
