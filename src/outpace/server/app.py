"""The app: wiring only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from outpace.common.version import __version__
from outpace.errors import OutpaceError
from outpace.server.api import anthropic, chat, completions, llama, models, ollama, operations, page, replay, responses
from outpace.server.auth import Guard, refusal
from outpace.server.engines.service import Service
from outpace.server.errors import APIError, Refusal
from outpace.server.settings import ServerSettings

_ROUTERS = (
    chat.router, completions.router, responses.router, anthropic.router, replay.router, ollama.router, ollama.bodies,
    llama.router, models.router, models.bodies, operations.router, page.router,
)  # fmt: skip


def create_app(service: Service) -> FastAPI:
    """The app over ``service``, which is closed with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(
        title="Outpace",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # page.py's route has it
        responses={status: {"model": Refusal} for status in ("4XX", "5XX")},
        separate_input_output_schemas=False,
    )
    app.state.service = service
    for router in _ROUTERS:
        app.include_router(router)
    for route in app.routes:  # FastAPI prepares them when the first is looked for: 50 ms, in the event loop
        route.matches({"type": "http", "method": "GET", "path": "/nothing", "root_path": ""})
    app.add_exception_handler(APIError, _refused)
    app.add_exception_handler(OutpaceError, _refused)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_middleware(Guard, service=service)
    if service.settings.cors:
        app.add_middleware(Pages, settings=service.settings)
    return app


class Pages(CORSMiddleware):
    """Lets browsers send what SDKs send, from pages of origins that the settings allow, local ones or not."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        super().__init__(
            app,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # SDKs send many of their own
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after"],
        )
        self._settings = settings

    def is_allowed_origin(self, origin: str) -> bool:
        return self._settings.allows(origin)


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(error, request.app.state.service, request.scope)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers)
    return refusal(refused, request.app.state.service, request.scope)
