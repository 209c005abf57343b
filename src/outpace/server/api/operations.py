"""What those who run the server ask: ``/health``, ``/ready``, ``/metrics`` and ``/v1/traces/{id}``."""

from __future__ import annotations

import json
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.server.api.route import scope_of, service_of
from outpace.server.errors import APIError
from outpace.server.observe.metrics import Metrics
from outpace.server.schema import Answer

router = APIRouter()


class Status(Answer):
    status: Literal["ok", "ready"]


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health() -> Status:
    """The process lives: answered as long as the event loop runs."""
    return Status(status="ok")


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Status:
    """Requests are taken; 503 while the server starts or shuts down, or when it has lost its engines."""
    service_of(request).check_ready()
    return Status(status="ready")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus's text."""
    service = service_of(request)
    found = next((observer for observer in service.observers if isinstance(observer, Metrics)), None)
    if found is None:
        raise APIError(404, "this server counts nothing: start it with metrics", code="no_metrics")
    data, kind = await found.exposition(service)
    return Response(data, headers={"content-type": kind})


@router.get("/v1/traces/{answer_id}", response_class=Response, responses={200: {"content": {"application/json": {}}}})
async def trace(request: Request, answer_id: str) -> Response:
    """What was drafted, accepted and chosen in every step of an answer, where the server keeps it (docs/traces.md)."""
    service, scope = service_of(request), scope_of(request)
    traces = service.traces
    if traces is None:
        raise APIError(404, "this server keeps no traces: start it with --traces 64", code="no_traces")

    def written() -> str:
        return json.dumps(traces.of(answer_id, scope), ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    return Response(await service.work(written), media_type="application/json")
