"""``GET /``: the page, and the files that it is made of. It asks for nothing outside this server."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace import __version__
from outpace.measure.view import colours, empty_page
from outpace.server.errors import APIError
from outpace.server.routes.answering import service_of

router = APIRouter(include_in_schema=False)

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "html": "text/html; charset=utf-8"}
_PARTS = ("app.js", "api.js", "answer.js", "dom.js", "render.js", "store.js", "style.css")


@router.get("/", response_model=None)
async def index(request: Request) -> Response:
    """The page."""
    return await _file(request, "index.html", {"content-security-policy": _POLICY})


@router.get("/page/about", response_model=None)
async def about(request: Request) -> dict[str, Any]:
    """What the page must know before it has a key."""
    return {"version": __version__, "traces": service_of(request).traces is not None}


@router.get("/page/steps", response_model=None)
async def steps(request: Request) -> Response:
    """The step viewer: its own policy, in the page, lets run only its script and style, by their hashes."""
    return await _file(request, "steps", {"content-security-policy": "frame-ancestors 'self'"})


@router.get("/page/{name}", response_model=None)
async def part(request: Request, name: str) -> Response:
    """A script or a style sheet of the page."""
    if name not in _PARTS and name != "colours.css":
        raise APIError(404, f"the page has no part {name!r}")
    return await _file(request, name, {})


async def _file(request: Request, name: str, more: dict[str, str]) -> Response:
    data, tag = await service_of(request).work(_read, name)
    headers = {**_HEADERS, **more, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers={**headers, "content-type": _KINDS.get(name.rpartition(".")[2], _KINDS["html"])})


@cache
def _read(name: str) -> tuple[bytes, str]:
    """A file of the page, and its tag."""
    files = resources.files("outpace.server") / "page"
    if name == "colours.css":
        text = colours()
    elif name == "steps":
        text = empty_page((files / "steps.js").read_text(encoding="utf-8"))
    else:
        text = (files / name).read_text(encoding="utf-8")
    data = text.encode()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
