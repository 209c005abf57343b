"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from outpace.server.errors import APIError
from outpace.server.routes.answering import service_of
from outpace.server.service import Service

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are served."""
    service = service_of(request)
    return {"object": "list", "data": [_told(service, name) for name in service.models.names()]}


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    if name not in service.models.names():
        raise APIError(404, f"the model {name!r} is not served", param="model", code="model_not_found")
    return _told(service, name)


def _told(service: Service, name: str) -> dict[str, Any]:
    known = service.known(name)
    told: dict[str, Any] = {"id": name, "object": "model", "created": service.started, "owned_by": "outpace"}
    if known is not None:
        told["max_model_len"] = known.info.max_length
        told["drafters"] = list(known.serving.engine.drafters)
    return told
