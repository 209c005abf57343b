"""A replica: an ``outpace serve`` of its own, which a Ray actor starts, watches and lends out."""

from __future__ import annotations

import asyncio
import ctypes
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import ray
from ray import serve

READY = re.compile(r"at http://(\S+):(\d+)/v1, and a page")
PATIENCE = 3.0  # seconds in which a server that lives says so: else another goes on with its answers
LIFE = 10.0  # seconds in which it says so, or Ray counts it as failing: after three times it is replaced
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Lease:
    """A place at a server. ``url``: without a path; ``update``: which options it was started with."""

    replica: str
    url: str
    update: str


class Replica:
    """``options``: of ``outpace serve``; ``alone``: all replicas are on this machine. Raises RuntimeError."""

    def __init__(self, options: Sequence[str], update: str, alone: bool) -> None:
        host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        command = [sys.executable, "-m", "outpace", "serve", *options, "--host", host, "--port", "0"]
        self._server = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=_ends_with_parent
        )
        url = f"http://{self._address()}"
        threading.Thread(target=deque, args=(self._log(), 0), daemon=True).start()
        self._lease = Lease(serve.get_replica_context().replica_id.unique_id, url, update)

    def _address(self) -> str:
        last = deque[str](maxlen=40)
        for line in self._log():
            if found := READY.search(line):
                return f"{found[1]}:{found[2]}"
            last.append(line)
        raise RuntimeError(f"outpace serve ended with {self._server.wait()}:\n{''.join(last)}")

    def _log(self) -> Iterator[str]:
        """The server's lines, each written to Ray's log of this process, too."""
        assert self._server.stderr is not None
        for line in self._server.stderr:
            sys.stderr.write(line)
            yield line

    async def lease(self, begins: list[str], avoid: list[str]) -> AsyncGenerator[Lease]:
        """Its lease, then nothing until the caller cancels: Ray counts it as a request in flight meanwhile."""
        if self._server.poll() is not None:
            raise RuntimeError("the server has ended")
        yield self._lease
        await asyncio.Event().wait()

    async def where(self) -> str:
        """The server's URL."""
        return self._lease.url

    async def check_health(self) -> None:
        """Raise unless the server lives: then Ray starts another replica."""
        if self._server.poll() is not None:
            raise RuntimeError(f"the server ended with {self._server.returncode}")
        await alive(self._lease.url, LIFE)

    def __del__(self) -> None:
        """Let requests that are in flight end, as on any SIGTERM."""
        self._server.send_signal(signal.SIGCONT)
        self._server.terminate()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()


async def alive(url: str, patience: float = PATIENCE) -> None:
    """Raise OSError, aiohttp.ClientError or TimeoutError unless the server at ``url`` says in time that it lives."""
    bound = aiohttp.ClientTimeout(total=patience)
    async with aiohttp.ClientSession(timeout=bound) as session, session.get(f"{url}/health") as answer:
        answer.raise_for_status()


def _ends_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)
