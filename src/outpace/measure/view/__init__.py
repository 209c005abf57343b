"""``outpace trace view``: a trace as one HTML page that asks for nothing outside itself.

The page's parts lie beside this file. What the trace says stands in the page as JSON that no text can leave, and a
content security policy lets run only the script and the style that are named by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from outpace.common.files import StrPath, write_bytes
from outpace.measure.trace import lines
from outpace.params import PARAMETERS


def page(path: StrPath, *, scripts: Sequence[str] = ()) -> str:
    """The page for the trace at ``path``. ``scripts``: run after the page's own (its tests). Raises ParameterError."""
    name = Path(path).name
    header, others, cut = lines(path)
    data = inert({"name": name, "cut": cut, "header": header, "lines": [shown(line) for line in others]})
    return _filled(f"{name}: an Outpace trace", data, scripts, "'none'")


def pages(paths: Sequence[StrPath]) -> str:
    """Pages side by side, each in a frame of its own; where one shows a token, the others show it, too. Raises
    ParameterError."""
    inner = [page(path) for path in paths]
    titles = [html.escape(Path(path).name) for path in paths]
    style = "html,body{height:100%;margin:0}body{display:flex;gap:2px}iframe{flex:1;border:0;min-width:0}"
    script = (
        "const frames_ = [...document.querySelectorAll('iframe')];\n"
        "addEventListener('message', (event) => {\n"
        "  for (const one of frames_)\n"
        "    if (frames_.some((other) => other.contentWindow === event.source) && one.contentWindow !== event.source)\n"
        "      one.contentWindow.postMessage(event.data, '*');\n"
        "});\n"
        "addEventListener('load', () => frames_[0].contentWindow.postMessage('lead', '*'));"
    )
    styles = f"{hashed(style)} {hashed(colours() + _file('page.css'))}"
    scripts = f"{hashed(_script())} {hashed(script)}"
    policy = f"default-src 'none'; style-src {styles}; script-src {scripts}; base-uri 'none'"
    names = " and ".join(titles)
    bodies = "".join(
        f'<iframe title="{title}" srcdoc="{html.escape(text)}"></iframe>'
        for title, text in zip(titles, inner, strict=True)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{names}: Outpace traces</title>'
        f"<style>{style}</style></head><body>{bodies}<script>{script}</script></body></html>"
    )


def empty_page(script: str) -> str:
    """The page without a trace: ``script`` gets one from where the page came from, puts it in place as JSON and calls
    ``start``."""
    return _filled("Outpace trace", "", [script], "'self'")


def colours() -> str:
    """The style sheet of who wrote what, for other pages that show it."""
    return _file("colours.css")


def _script() -> str:
    """The page's script: its functions of what decided tokens, then the page itself."""
    return _file("decided.js") + _file("page.js")


def _file(name: str) -> str:
    """A part of the page, which lies beside this file."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """A trace's line as the page reads it: a seed has 64 bits, a number in JavaScript 53. ``changed``: parameters that
    change the distribution, and are not at their defaults."""
    if "request" not in line:
        return line
    request = line["request"]
    given = ((name, p, request["params"].get(name, p.default)) for name, p in PARAMETERS.items())
    changed = {
        name: value
        for name, p, value in given
        if p.stage in ("logits", "filter") and p.values.json in (int, float) and value != p.default
    }
    return {**line, "request": {**request, "seed": str(request["seed"]), "changed": changed}}


def _filled(title: str, data: str, scripts: Sequence[str], connect: str) -> str:
    style = colours() + _file("page.css")
    all_scripts = [_script(), *scripts]
    policy = (
        f"default-src 'none'; style-src {hashed(style)}; script-src {' '.join(map(hashed, all_scripts))}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(title),
        "style": style,
        "data": data,
        "script": "</script>\n<script>".join(all_scripts),
    }
    out: list[str] = []
    for piece in _file("page.html").split("{{"):  # once over: what is filled in is never looked at again
        name, closed, rest = piece.partition("}}")
        out.append(parts[name] + rest if closed else piece)
    return "".join(out)


def write(path: StrPath, out: StrPath, *others: StrPath, scripts: Sequence[str] = ()) -> None:
    """Write the page, whole or not at all; ``others``: traces to show beside it. Raises ParameterError or OSError."""
    text = pages([path, *others]) if others else page(path, scripts=scripts)
    write_bytes(Path(out), text.encode())


def inert(value: Any) -> str:
    """JSON in ASCII without ``<``, ``>`` or ``&``: nothing in it can end the element that it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
