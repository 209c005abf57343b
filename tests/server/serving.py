"""A server on a loopback port, in a thread of its own, for tests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from outpace import AsyncEngine, Engine
from outpace.server.engines.generation import Observer
from outpace.server.engines.models import SingleModel
from outpace.server.engines.runner import Server, bound
from outpace.server.engines.service import Service
from outpace.server.settings import ServerSettings


class Running:
    """A server that runs. ``url``: without a path; ``service`` belongs to its loop."""

    def __init__(self, server: Server, service: Service, loop: asyncio.AbstractEventLoop, engine: AsyncEngine) -> None:
        self.server, self.service, self.loop, self.engine = server, service, loop, engine
        self.url = f"http://127.0.0.1:{server.address[1]}"
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=None))

    def client(self) -> openai.OpenAI:
        """The one that threads share, closed with the server."""
        return self._client

    def close(self) -> None:
        """Stop the server; its thread ends."""
        self._client.close()
        self.http.close()
        self.loop.call_soon_threadsafe(self.server.stop)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Post ``body`` as JSON; bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=data, headers={"content-type": "application/json", **headers})

    def answer(self, path: str, body: Any, status: int = 200) -> Any:
        """What is answered with ``status``, as JSON."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, but for its end."""
        response = self.post(path, {**body, "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def call(self, waiting: Any, timeout: float = 30) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(waiting, self.loop).result(timeout)

    @contextmanager
    def held(self) -> Iterator[threading.Event]:
        """The engine does not go on from the end of its next step; the event is set once it has come there."""
        reached, go_on = threading.Event(), threading.Event()

        def hold(record: Any) -> None:
            reached.set()
            assert go_on.wait(60)

        self.on_step(hold)
        try:
            yield reached
        finally:
            go_on.set()
            self.on_step(None)

    def on_step(self, listener: Callable[[Any], None] | None) -> None:
        """Let the engine call ``listener`` after each step."""

        def listen(engine: Engine) -> None:
            engine.on_step = listener

        self.call(self.engine.ask(listen))

    def at_rest(self, seconds: float = 10) -> None:
        """Wait until nothing runs, and assert that nothing is left."""

        async def wait() -> None:
            async with asyncio.timeout(seconds):
                while self.service.inside or not await self.engine.ask(lambda engine: engine.idle):
                    await asyncio.sleep(0.01)
            await self.engine.ask(lambda engine: engine.check())

        self.call(wait(), seconds + 5)
        for name in self.service.models.names():
            known = self.service.known(name)
            assert known is None or known.admission.inside == known.admission.largest == 0


@contextmanager
def serving(
    engine: Engine, name: str = "demo", observers: Sequence[Observer] = (), **settings: Any
) -> Iterator[Running]:
    """Serves ``engine``, which is closed at the end."""
    started = threading.Event()
    found: list[Any] = []

    def run() -> None:
        async def main() -> None:
            its = AsyncEngine(engine)
            options = ServerSettings(**{"port": 0, "drain": 5.0, **settings})
            service = Service(SingleModel(name, its), options, fingerprint=lambda its: "test", observers=observers)
            listener = bound(options)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # one who reads nothing is soon noticed
            server = Server(service, listener)
            task = asyncio.create_task(server.run_until_stopped())
            while not server.started:
                if task.done():
                    await task
                await asyncio.sleep(0.005)
            found.append(Running(server, service, asyncio.get_running_loop(), its))
            started.set()
            await task

        try:
            asyncio.run(main())
        except BaseException as error:
            found.append(error)
            started.set()
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    if isinstance(found[0], BaseException):
        raise found[0]
    running: Running = found[0]
    try:
        yield running
    finally:
        running.close()
        thread.join(30)
        assert not thread.is_alive()
