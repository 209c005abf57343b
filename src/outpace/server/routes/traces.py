"""``GET /v1/traces/{id}``: the steps of an answer, where the server keeps them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outpace.server.errors import APIError
from outpace.server.routes.answering import answer, scope_of, service_of

router = APIRouter()


@router.get("/v1/traces/{answer_id}", response_model=None)
async def trace(request: Request, answer_id: str) -> Response:
    """What was drafted, kept and said in every step of the answer (docs/traces.md)."""
    traces, scope = service_of(request).traces, scope_of(request)
    if traces is None:
        raise APIError(404, "this server keeps no traces: start it with --traces 64", code="no_traces")
    return await answer(request, lambda: traces.of(answer_id, scope))
