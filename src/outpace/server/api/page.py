"""``GET /``, the page, and ``GET /docs``, the API described. Neither asks for anything outside this server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.common.version import __version__
from outpace.measure import learn as learned
from outpace.measure.view import colours, empty_page
from outpace.server.api.route import service_of
from outpace.server.errors import APIError

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
@router.head("/", response_model=None)
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


@router.get("/page/learn", response_model=None)
async def learn(request: Request) -> Response:
    """The page of ``outpace learn``, with the runs that ship."""
    return await _file(request, "learn", {"content-security-policy": "frame-ancestors 'none'"})


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
    elif name == "learn":
        text = learned.page(learned.recorded())
    else:
        text = (files / name).read_text(encoding="utf-8")
    data = text.encode()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto;
padding: 0 1rem } code, .type { font-family: ui-monospace, monospace; font-size: 13px } h2 { margin-top: 2.5rem }
.table { overflow-x: auto } table { border-collapse: collapse } td, th { text-align: left; vertical-align: top;
padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #8884 }
"""
_DOCS_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Every operation, every field."""
    text = await service_of(request).work(lambda: described(request.app.openapi()))
    return Response(text, media_type="text/html", headers={"content-security-policy": _DOCS_POLICY})


@router.get("/openapi.json", response_model=None)
@router.head("/openapi.json", response_model=None)
async def document(request: Request) -> Response:
    """The same for programs. FastAPI would take most of a second to make it, in the event loop."""

    def written() -> bytes:
        return json.dumps(request.app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    return Response(await service_of(request).work(written), media_type="application/json")


def described(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI ``document``."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
    return f"{head}<body><h1>{title}</h1><p>As <a href='openapi.json'>JSON</a>.</p>{''.join(_body(document))}</body>"


def _body(document: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            for media in operation.get("requestBody", {}).get("content", {}).values():
                yield f"<p>Takes {_type(media['schema'])}.</p>"
            content = operation["responses"].get("200", {}).get("content", {})
            answer = content.get("application/json", {}).get("schema", {})
            if "$ref" in answer:
                yield f"<p>Answers {_type(answer)}.</p>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
        yield f"<p>{escape(schema.get('description', ''))}</p>"
        if "properties" in schema:
            yield from _table(schema)
        else:
            yield f"<p>{_type(schema)}</p>"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield '<div class="table"><table><tr><th>Field<th>Type<th></tr>'
    for name, field in schema["properties"].items():
        needed = "Required. " if name in schema.get("required", ()) else ""
        description = escape(needed + field.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code><td class='type'>{_type(field)}<td>{description}</tr>"
    yield "</table></div>"


def _type(schema: Mapping[str, Any]) -> str:
    """A type in a few words, those of the document's own with links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_type(each) for each in schema[several])
    if "const" in schema or "enum" in schema:
        return " or ".join(escape(repr(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    return escape(str(schema.get("type", "anything")))
