"""``GET /health``: the process lives. ``GET /ready``: it takes requests."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from outpace.server.routes.answering import service_of

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Answered as long as the event loop turns."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """503 while the server starts, ends, or has lost an engine."""
    service_of(request).check_ready()
    return {"status": "ready"}
