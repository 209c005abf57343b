"""``GET /metrics``: what the observer counted."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.server.errors import APIError
from outpace.server.routes.answering import service_of

router = APIRouter()


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Prometheus's text."""
    service = service_of(request)
    if service.observer is None:
        raise APIError(404, "this server counts nothing: start it with metrics", code="no_metrics")
    data, kind = await service.observer.exposition(service)
    return Response(data, headers={"content-type": kind})
