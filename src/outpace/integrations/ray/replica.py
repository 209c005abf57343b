"""A replica: an ``outpace serve`` of its own, which a Ray actor starts, watches and lends out."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import aiohttp
import ray
from ray import serve

READY = re.compile(r"at http://(\S+):(\d+)/v1, and a page")
PATIENCE = 3.0  # seconds in which a server that lives says so
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
        handle, self._log = tempfile.mkstemp(prefix="outpace-replica-", suffix=".log")
        command = [sys.executable, "-m", "outpace", "serve", *options, "--host", host, "--port", "0"]
        self._server = subprocess.Popen(command, stderr=handle, preexec_fn=_ends_with_parent)
        os.close(handle)
        where = self._address()
        self._lease = Lease(serve.get_replica_context().replica_id.unique_id, f"http://{where}", update)

    def _address(self) -> str:
        while self._server.poll() is None:
            if found := READY.search(self._said()):
                return f"{found[1]}:{found[2]}"
            try:
                self._server.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        raise RuntimeError(f"outpace serve ended with {self._server.returncode}:\n{self._said()[-4000:]}")

    def _said(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as log:
            return log.read()

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
        await alive(self._lease.url)

    def __del__(self) -> None:
        """Let requests that are in flight end, as on any SIGTERM."""
        self._server.send_signal(signal.SIGCONT)
        self._server.terminate()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
        os.unlink(self._log)


async def alive(url: str) -> None:
    """Raise OSError, aiohttp.ClientError or TimeoutError unless the server at ``url`` says in time that it lives."""
    bound = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(timeout=bound) as session, session.get(f"{url}/health") as answer:
        answer.raise_for_status()


def _ends_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(1, signal.SIGKILL)
