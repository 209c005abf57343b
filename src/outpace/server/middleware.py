"""What every request goes through first: its id, and whose it is."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from outpace.server import errors
from outpace.server.logs import REQUEST_ID
from outpace.server.security import Keys
from outpace.server.service import Service
from outpace.server.streaming import Receive, Scope, Send

log = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)


def refusal(error: Exception, service: Service, what: str) -> Response:
    """The answer to a request that failed: all that its client can mend, and nothing of our insides."""
    told = errors.of(error)
    if service.observer is not None:
        service.observer.refused(told)
    if told.status >= 500 and told is not error:
        log.error("%s failed", what, exc_info=error)
    return JSONResponse(told.body(), told.status, headers=told.headers)


class Guard:
    """Pure ASGI, so that a client that goes away is noticed below."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._keys = app, service, Keys(service.settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope["outpace.request_id"] = request_id
        REQUEST_ID.set(request_id)
        begun = False

        async def tell(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            scope["outpace.scope"] = self._keys.scope(scope["path"], headers.get(b"authorization"))
            await self._app(scope, receive, tell)
        except Exception as error:
            if begun:
                raise
            await refusal(error, self._service, f"{scope['method']} {scope['path']}")(scope, receive, tell)
