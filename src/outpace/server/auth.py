"""What every request passes first: its id, whether a web page of another's sent it, and its API key.

A page that a browser shows may send requests here, and a name of its own that it has made to mean this machine lets it
read the answers (DNS rebinding). So a server that listens on loopback is called by names of this machine alone, and no
page of another origin is answered unless it is allowed. Keys are compared in constant time and never logged; each is a
scope of its own for what requests may share.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import uuid
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outpace.server import errors
from outpace.server.engines.shares import KEY
from outpace.server.errors import APIError
from outpace.server.observe.logs import REQUEST_ID

if TYPE_CHECKING:
    from outpace.server.engines.service import Service
    from outpace.server.settings import ServerSettings

log = logging.getLogger(__name__)

OPEN = ("/health", "/ready", "/", "/docs", "/openapi.json")  # paths that need no key
_OPEN_BELOW = "/page/"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)


def routed(path: str) -> str:
    """``path`` as routes have it: without slashes at its end and doubled at its beginning, and with one /v1, which
    clients leave out or repeat where a base URL has or lacks it."""
    path = f"/{path.strip('/')}"
    while path.startswith("/v1/v1/"):
        path = path[3:]
    return f"/v1{path}" if path.split("/")[1] in _WITHOUT_V1 else path


_WITHOUT_V1 = ("chat", "responses", "messages", "models", "embeddings")  # /completions is llama.cpp's


class Keys:
    """``keys``: none lets everybody in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def scope(self, path: str, authorization: Sequence[str]) -> str:
        """Whose request this is, from its Authorization headers (or Anthropic's x-api-key made one): "" without keys.
        Raises APIError (400, 401)."""
        if not self._digests or path in OPEN or path.startswith(_OPEN_BELOW):
            return ""
        if len(authorization) > 1:
            raise APIError(400, f"the request has {len(authorization)} API keys: send one")
        scheme, _, key = "".join(authorization).partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = -1
        for i, digest in enumerate(self._digests):
            found = i if hmac.compare_digest(digest, given) else found
        if scheme.lower() != "bearer" or found < 0:
            raise APIError(
                401, "the API key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return f"key-{given[:8].hex()}"  # not its number: what is shared may outlive this list of keys


class Web:
    """Which requests of web pages are answered."""

    def __init__(self, settings: ServerSettings) -> None:
        self._allows = settings.allows
        self._own = {settings.host.lower(), "localhost", *(host.lower() for host in settings.allow_hosts)}
        self._by_name = settings.loopback or bool(settings.allow_hosts)
        self._by_origin = settings.loopback or not settings.api_keys  # a page of another's has no key

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise APIError (403) for a Host header that names another machine, or an Origin header of another page."""
        found = _HOST.fullmatch(host or "")
        name = found[1].lower() if found else ""
        own = name in self._own or name.endswith(".localhost") or _is_address(name)
        if self._by_name and host is not None and not own:
            raise APIError(
                403, f"this server is not called {name[:100]!r}: allow it with --allow-host", code="host_not_allowed"
            )
        if origin is None or not self._by_origin or self._allows(origin):
            return
        if origin.lower().partition("://")[2] != (host or "").lower():
            raise APIError(
                403, f"pages of {origin[:100]!r} may not ask: allow them with --cors", code="origin_not_allowed"
            )


_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]*)?", re.ASCII)


def _is_address(name: str) -> bool:
    """A number is no name that another could have made to mean this machine."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def refusal(error: Exception, service: Service, scope: Scope) -> Response:
    """The answer to a request that failed: all that its client can mend, and nothing internal, in the form that
    clients of its path read."""
    refused = errors.of(error)
    for observer in () if refused.observed else service.observers:
        observer.refused(refused)
    if refused.status >= 500 and refused is not error:
        log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    body = errors.written(refused, scope["path"])
    return Response(body, refused.status, headers=refused.headers, media_type="application/json")


class Guard:
    """The middleware: pure ASGI, so that routes notice a client that goes away."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service, self._keys = app, service, Keys(service.settings.api_keys)
        self._web = Web(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = routed(scope["path"])
        headers: dict[bytes, list[Any]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value.decode("latin-1"))
        given = headers.get(b"x-request-id", [""])[-1]
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope["outpace.request_id"] = request_id
        REQUEST_ID.set(request_id)
        begun = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            self._web.check(headers.get(b"host", [None])[-1], headers.get(b"origin", [None])[-1])
            keys = [*headers.get(b"authorization", ()), *(f"Bearer {key}" for key in headers.get(b"x-api-key", ()))]
            scope["outpace.scope"] = key = self._keys.scope(scope["path"], keys)
            KEY.set(key or f"address {(scope['client'] or ('',))[0]}")
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if begun:
                raise
            await refusal(error, self._service, scope)(scope, receive, send_with_id)
