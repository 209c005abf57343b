"""``GET /docs``: the OpenAPI document as a page of its own, which asks nobody for anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.server.routes.answering import service_of

router = APIRouter()

_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto;
padding: 0 1rem } code, .type { font-family: ui-monospace, monospace; font-size: 13px } h2 { margin-top: 2.5rem }
.table { overflow-x: auto } table { border-collapse: collapse } td, th { text-align: left; vertical-align: top;
padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #8884 }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Every operation, every field."""
    text = await service_of(request).work(lambda: page(request.app.openapi()))
    return Response(text, media_type="text/html", headers={"content-security-policy": _POLICY})


def page(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI ``document``."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    head += f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
    return f"{head}<body><h1>{title}</h1><p>As <a href='openapi.json'>JSON</a>.</p>{''.join(_body(document))}</body>"


def _body(document: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        for method, its in operations.items():
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            yield f"<p>{escape(its.get('description', ''))}</p>"
            for media in its.get("requestBody", {}).get("content", {}).values():
                yield f"<p>Takes {_type(media['schema'])}.</p>"
    for name, schema in document["components"]["schemas"].items():
        yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
        yield f"<p>{escape(schema.get('description', ''))}</p>"
        if "properties" in schema:
            yield from _table(schema)
        else:
            yield f"<p>{_type(schema)}</p>"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield '<div class="table"><table><tr><th>Field<th>Type<th></tr>'
    for name, its in schema["properties"].items():
        needed = "Required. " if name in schema.get("required", ()) else ""
        said = escape(needed + its.get("description", ""))
        yield f"<tr><td><code>{escape(name)}</code><td class='type'>{_type(its)}<td>{said}</tr>"
    yield "</table></div>"


def _type(schema: Mapping[str, Any]) -> str:
    """A type in a few words, those of the document's own with links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_type(its) for its in schema[several])
    if "const" in schema or "enum" in schema:
        return " or ".join(escape(repr(its)) for its in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    return escape(str(schema.get("type", "anything")))
