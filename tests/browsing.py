"""Pages in a headless Chromium: where it is, and what a reader's eye would stumble over in what it drew."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: scripts/browser looks for one")
LOOKS = {"light": (1100, "light"), "dark": (1100, "dark"), "phone": (390, "light")}  # width, the system's colours
SMALLEST = 11  # pixels of a letter's height
WCAG = 4.5  # contrast of text, level AA

# Of each visible text: its contrast against what is painted under it, and its size as drawn; of each element: whether
# it, or what it holds, is wider than the place it has. What scrolls sideways by itself (code) may hold more.
_LOOK = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const mixed = (colours) => {  // painted over one another, as the browser does
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = (own) =>
    own.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && !own.closest(".unseen, option");
  const scrolls = (own) => ["auto", "scroll"].includes(getComputedStyle(own).overflowX);
  const named = (own) => [own.tagName.toLowerCase(), "#", own.id, " ", [...own.classList].join("."),
    " “", own.textContent.trim().slice(0, 30), "”"].join("");
  const contrast = {}, size = {}, wide = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const own = node.parentElement, text = node.data.trim().slice(0, 30);
    if (!text || !seen(own)) continue;
    const under = [], drawn = own instanceof SVGElement, style = getComputedStyle(own);
    for (let each = own; each; each = each.parentElement) under.unshift(getComputedStyle(each).backgroundColor);
    const [a, b] = [mixed(under), mixed([...under, drawn ? style.fill : style.color])].map(light);
    contrast[text] = Math.min(contrast[text] ?? 99, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
    size[text] = Math.min(size[text] ?? 99, parseFloat(style.fontSize) * (drawn ? own.getScreenCTM().a : 1));
  }
  if (document.documentElement.scrollWidth > document.documentElement.clientWidth) wide.push("the page");
  for (const own of document.querySelectorAll("body *")) {
    if (!seen(own) || own instanceof SVGElement && own.tagName !== "text") continue;
    const box = own.getBoundingClientRect(), svg = own.closest("svg");
    const place = (svg || document.documentElement).getBoundingClientRect();
    let end = place.right;
    for (let each = svg ? null : own.parentElement; each; each = each.parentElement)
      if (scrolls(each)) end = Math.max(end, each.getBoundingClientRect().left + each.scrollWidth);
    const out = box.width && (box.left < place.left - 1 || box.right > end + 1);
    const free = svg || !own.clientWidth || ["INPUT", "SELECT", "PRE"].includes(own.tagName);
    const cut = own.scrollWidth > own.clientWidth + 3 && getComputedStyle(own).textOverflow !== "ellipsis";
    if (out || !free && cut) wide.push(named(own));
  }
  return { contrast, size, wide };
}"""


@contextmanager
def started(*arguments: str) -> Iterator[Any]:
    """A browser; skips where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if BROWSER is None:
        pytest.skip("no Chromium is installed: scripts/browser looks for one")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", *arguments])
        yield found
        found.close()


def opened(browser: Any, address: str, faults: list[str], look: str = "light") -> Any:
    """The page at ``address``; errors of its scripts and console, and requests that leave this machine's server or
    file, are added to ``faults``."""
    width, scheme = LOOKS[look]
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    own = tuple({"file:", "data:", "about:", address.partition("/page")[0]})
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(own) else faults.append(request.url))
    page.goto(address)
    return page


def faults_of(page: Any) -> dict[str, Any]:
    """What in ``page`` (or a frame's body) is too pale, too small, or wider than its place; nothing of it, if all is
    well."""
    found = page.evaluate(_LOOK)
    assert len(found["contrast"]) > 10, "nothing was drawn"
    return {
        "pale": {text: round(ratio, 2) for text, ratio in found["contrast"].items() if ratio < WCAG},
        "small": {text: size for text, size in found["size"].items() if round(size, 1) < SMALLEST},
        "wide": found["wide"],
    }
