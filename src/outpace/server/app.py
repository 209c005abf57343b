"""The app: wiring only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from outpace import __version__
from outpace.errors import OutpaceError
from outpace.server.errors import APIError
from outpace.server.middleware import Guard, refusal
from outpace.server.routes import (
    chat,
    completions,
    docs,
    health,
    metrics,
    models,
    page,
    replay,
    responses,
    tokenize,
    traces,
)
from outpace.server.routes.described import describe
from outpace.server.schema.chat import ChatRequest
from outpace.server.schema.completions import CompletionRequest
from outpace.server.schema.replay import ReplayRequest
from outpace.server.schema.responses import ResponsesRequest
from outpace.server.schema.tokens import DetokenizeRequest, TokenizeRequest
from outpace.server.service import Service

_BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest, ReplayRequest)


def create_app(service: Service) -> FastAPI:
    """The app over ``service``, which is closed with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = _App(title="Outpace", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for route in (chat, completions, responses, replay, traces, models, tokenize, health, metrics, docs, page):
        app.include_router(route.router)
    app.add_exception_handler(APIError, _told)
    app.add_exception_handler(OutpaceError, _told)
    app.add_exception_handler(HTTPException, _routing)
    app.add_middleware(Guard, service=service)
    if service.settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


class _App(FastAPI):
    """Its document has the bodies that routes read themselves."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = describe(super().openapi(), _BODIES)
        return self.openapi_schema


async def _told(request: Request, error: Exception) -> Response:
    return refusal(error, request.app.state.service, f"{request.method} {request.url.path}")


async def _routing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers)
    return refusal(told, request.app.state.service, told.message)
