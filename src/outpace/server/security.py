"""API keys: compared in constant time, never logged; each is a scope of its own for what requests may share."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from outpace.server.errors import APIError

OPEN = ("/health", "/ready", "/", "/docs", "/openapi.json")  # paths that need no key
_OPEN_BELOW = "/page/"


class Keys:
    """``keys``: none lets everybody in."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def scope(self, path: str, authorization: str | None) -> str:
        """Whose request this is: "" without keys. Raises APIError (401)."""
        if not self._digests or path in OPEN or path.startswith(_OPEN_BELOW):
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = -1
        for i, digest in enumerate(self._digests):
            found = i if hmac.compare_digest(digest, given) else found
        if scheme.lower() != "bearer" or found < 0:
            raise APIError(
                401, "the API key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        return f"key-{found}"
