"""``outpace learn``: ten chapters about speculative decoding on recorded runs, as one HTML page that asks for nothing
outside itself. Its parts lie beside this file, and the runs that ship with it (``record`` makes others).
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from outpace.common.files import StrPath, write_bytes
from outpace.control.cost import Cost
from outpace.exact import sampling, verify
from outpace.measure import plan
from outpace.measure.view import colours, hashed, inert
from outpace.models.base import KVCache

_SCRIPTS = ("arithmetic.js", "drawing.js", "chapters.js", "more.js")
_CODE: dict[str, Callable[..., Any]] = {  # what chapters show
    "choose": sampling.choose,
    "width": Cost.width,
    "walk": verify.walk,
    "reject": verify.reject,
    "residual": verify._residual,
    "settle": KVCache.settle,
    "plan": plan.plan,
}


def recorded() -> dict[str, Any]:
    """The runs that ship: the demo model's."""
    found: dict[str, Any] = json.loads(_file("recorded.json"))
    return found


def page(runs: Mapping[str, Any], script: str = "") -> str:
    """The page with ``runs``. ``script``: runs after the page's own (its tests)."""
    style = colours() + _file("page.css")
    code = "\n".join(_file(name) for name in _SCRIPTS) + script
    policy = f"default-src 'none'; style-src {hashed(style)}; script-src {hashed(code)}; base-uri 'none'"
    data = inert({**runs, "code": {name: textwrap.dedent(inspect.getsource(made)) for name, made in _CODE.items()}})
    text = _file("page.html")
    head, _, rest = text.partition("{{data}}")  # what is filled in is never looked at again
    head = head.replace("{{policy}}", policy, 1).replace("{{style}}", style, 1)
    return head + data + rest.replace("{{script}}", code, 1)


def write(path: StrPath, runs: Mapping[str, Any]) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    write_bytes(Path(path), page(runs).encode())


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
