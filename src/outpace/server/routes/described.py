"""Bodies in the OpenAPI document: routes read them themselves, off the event loop, so they are described here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

REFERENCE = "#/components/schemas/{model}"


def describes(kind: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that takes a ``kind``."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(document: dict[str, Any], kinds: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The document with the schemas of ``kinds``, which its routes name."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=REFERENCE)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return document
