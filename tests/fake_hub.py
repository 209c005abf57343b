"""A hub on loopback: repositories of files, with everything that goes wrong on a network, on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Answer = Callable[[BaseHTTPRequestHandler], None]
COMMIT = "c0ffee" * 6 + "c0ff"


class FakeHub:
    """``files``: repository -> name -> content. ``faults`` are taken one a request for a file's content, first in first
    out; ``asked`` has what was asked for, with the headers."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.faults: deque[Answer | None] = deque()
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.lies: dict[str, bytes] = {}  # content whose checksum is told instead
        self.tells_digests = True  # in the listing
        self.content_at = ""  # where files lie, if not here
        self.url = ""

    def paths(self, method: str = "GET") -> list[str]:
        return [path for its, path, _ in self.asked if its == method]

    def listing(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, content in self.files[repo].items():
            item: dict[str, Any] = {"rfilename": name}
            if self.tells_digests:
                told = self.lies.get(name, content)
                item["lfs"] = {"sha256": hashlib.sha256(told).hexdigest(), "size": len(content)}
            siblings.append(item)
        return {"sha": COMMIT, "siblings": siblings}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path, dict(request.headers)))
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").partition("/revision/")[0]
            if repo not in self.files:
                return plain(request, 404)
            if repo.startswith("closed/") and request.headers.get("Authorization") != "Bearer secret-token":
                return plain(request, 401)
            return plain(request, 200, json.dumps(self.listing(repo)).encode())
        repo, _, rest = path[1:].partition("/resolve/")
        name = rest.partition("/")[2]
        content = self.files.get(repo, {}).get(name)
        if content is None:
            return plain(request, 404)
        if request.command == "GET" and self.faults:
            fault = self.faults.popleft()
            if fault is not None:
                return fault(request)
        if self.content_at and not request.headers.get("X-Here"):
            told = hashlib.sha256(self.lies.get(name, content)).hexdigest()
            headers = {
                "Location": self.content_at + request.path,
                "X-Linked-Etag": f'"{told}"',
                "X-Linked-Size": str(len(content)),
            }
            return plain(request, 302, headers=headers)
        return send(request, content)


def plain(request: BaseHTTPRequestHandler, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
    request.send_response(code)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def send(
    request: BaseHTTPRequestHandler, content: bytes, *, most: int | None = None, whole: bool = False, bad: bool = False
) -> None:
    """The content, from where Range says; ``most``: the connection is cut after so many bytes; ``whole``: Range is not
    known; ``bad``: one bit is wrong."""
    asked = request.headers.get("Range", "")
    start = 0 if whole or not asked else int(asked.removeprefix("bytes=").rstrip("-"))
    if start >= len(content):
        return plain(request, 416)
    body = content[start:]
    if bad:
        body = bytes([body[0] ^ 1]) + body[1:]
    request.send_response(206 if start else 200)
    request.send_header("Content-Length", str(len(body)))
    if start:
        request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    request.end_headers()
    request.wfile.write(body if most is None else body[:most])
    request.close_connection = True
    return None


class _Crowded(ThreadingHTTPServer):
    request_queue_size = 64  # connections that wait: with five, a crowd's are dropped


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server on loopback whose every request ``answer`` answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, *args: object) -> None:
            """Nothing."""

    server = _Crowded(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
