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
        self.url = ""

    def paths(self, method: str = "GET") -> list[str]:
        return [path for its, path, _ in self.asked if its == method]

    def listing(self, repo: str) -> dict[str, Any]:
        siblings = []
        for name, content in self.files[repo].items():
            lfs = {"sha256": self.digest(name, content), "size": len(content), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(content), "lfs": lfs})
        return {"id": repo, "sha": COMMIT, "siblings": siblings}

    def tree(self, repo: str) -> list[dict[str, Any]]:
        """What downloads of a whole repository go by."""
        found = self.files[repo].items()
        return [{"type": "file", "path": name, "size": len(c), "oid": self.digest(name, c)} for name, c in found]

    def digest(self, name: str, content: bytes) -> str:
        return hashlib.sha256(self.lies.get(name, content)).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path, dict(request.headers)))
        if path.startswith("/api/models/"):
            repo, tree, _ = path.removeprefix("/api/models/").partition("/revision/")[0].partition("/tree/")
            if repo not in self.files:
                return plain(request, 404)
            if repo.startswith("closed/") and request.headers.get("Authorization") != "Bearer secret-token":
                return plain(request, 401)
            found = self.tree(repo) if tree else self.listing(repo)
            return plain(request, 200, json.dumps(found).encode())
        repo, _, rest = path[1:].partition("/resolve/")
        name = rest.partition("/")[2]
        content = self.files.get(repo, {}).get(name)
        if content is None:
            return plain(request, 404)
        if request.command == "HEAD":
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.digest(name, content)}"'}
            return plain(request, 200, content, headers)
        fault = self.faults.popleft() if self.faults else None
        return send(request, content) if fault is None else fault(request)


def plain(request: BaseHTTPRequestHandler, code: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
    request.send_response(code)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def send(request: BaseHTTPRequestHandler, content: bytes, *, most: int | None = None) -> None:
    """The content, from where Range says; ``most``: the connection is cut after so many bytes."""
    asked = request.headers.get("Range", "")
    start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
    if start >= len(content):
        return plain(request, 416)
    body = content[start:]
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
