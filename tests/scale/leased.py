"""An ingress before servers that are leased in turn, without Ray: prints which were leased, and what it answered.

Run by test_fingerprint.py in the environment that has Ray. Arguments: the request's body, then URLs of servers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from starlette.requests import Request

from outpace.integrations.ray.ingress import Ingress
from outpace.integrations.ray.replica import Lease


class Turns:
    """What a handle of replicas does for an ingress: each request begins at the next server that it has not lost."""

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.leased, self.lease, self._next = urls, list[str](), self, 0

    def options(self, *, stream: bool) -> Turns:
        return self

    def remote(self, begins: list[str], avoid: list[str]) -> Turns:
        return self.calls([url for url in self.urls if url not in avoid])

    def calls(self, urls: list[str]) -> Any:
        url = urls[self._next % len(urls)]
        self._next += 1
        self.leased.append(url)

        class Calls:
            async def __anext__(self) -> Lease:
                return Lease(url, url, "one update")

            def cancel(self) -> None:
                pass

        return Calls()


async def answered(ingress: Ingress, body: bytes) -> str:
    path = "/v1/completions"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    response = await ingress(Request(scope, receive))
    if hasattr(response, "body_iterator"):
        return b"".join([part async for part in response.body_iterator]).decode()
    return bytes(response.body).decode()


async def main(body: str, urls: list[str]) -> None:
    turns = Turns(urls)
    ingress = Ingress(turns, 1 << 20)  # type: ignore[arg-type]
    answers = [await answered(ingress, body.encode()) for _ in urls]
    print(json.dumps({"leased": [urls.index(url) for url in turns.leased], "answers": answers}))
    if ingress._session is not None:
        await ingress._session.close()


asyncio.run(main(sys.argv[1], sys.argv[2:]))
