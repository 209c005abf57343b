"""The same routers before real servers of one thread each, to compare with what the simulation says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.servers import OURS, started
from benchmarks.simulate.replicas import Router
from outpace.integrations.ray.routing import beginnings

SYSTEMS, SYSTEM, TURNS, ANSWER = 24, 900, 3, 32  # system prompts, their letters, turns of a conversation, tokens
READERS = 8  # clients of each server, each with one conversation after the other
WORDS = ["bread", "river", "mountain", "letter", "window", "garden", "paper", "stone", "music", "winter"]


@dataclass(slots=True)
class Servers:
    """``router`` before servers at ``urls``."""

    router: Router
    urls: list[str]
    load: dict[str, int] = field(init=False)
    prompt: int = 0  # tokens
    found: int = 0
    written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.load = dict.fromkeys(self.urls, 0)

    def converse(self, messages: list[dict[str, str]], questions: list[str]) -> None:
        """One conversation. Raises httpx.HTTPError."""
        with httpx.Client(timeout=120) as client:
            for question in questions:
                messages.append({"role": "user", "content": question})
                body = {"messages": messages, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
                with self._lock:
                    url = self.router.choose(beginnings(body), self.load)
                    assert url is not None
                    self.load[url] += 1
                answer = client.post(f"{url}/chat/completions", json=body).raise_for_status().json()
                messages.append(answer["choices"][0]["message"])
                self._count(url, answer["usage"])

    def _count(self, url: str, usage: dict[str, Any]) -> None:
        with self._lock:
            self.load[url] -= 1
            self.prompt += usage["prompt_tokens"]
            self.found += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            self.written += usage["completion_tokens"]


def measured(router: Router, count: int, seconds: float, log: Path) -> dict[str, float]:
    """Shares of prompt tokens found and answers' tokens a second, of ``count`` fresh servers. Raises OSError."""
    with ExitStack() as stack:
        running = [stack.enter_context(started(f"{OURS} --threads 1 --drafter none", log)) for _ in range(count)]
        servers = Servers(router, [each.remote.base for each in running])
        asked, lock, begun = _conversations(), threading.Lock(), time.monotonic()

        def reader() -> None:
            while time.monotonic() - begun < seconds:
                with lock:
                    conversation = next(asked)
                servers.converse(*conversation)

        with ThreadPoolExecutor(READERS * count) as pool:
            for each in [pool.submit(reader) for _ in range(READERS * count)]:
                each.result()
        return {"hits": servers.found / servers.prompt, "tokens": servers.written / (time.monotonic() - begun)}


def _conversations() -> Iterator[tuple[list[dict[str, str]], list[str]]]:
    rng = np.random.default_rng(0)
    systems = [_text(rng, SYSTEM) for _ in range(SYSTEMS)]
    while True:
        system = {"role": "system", "content": systems[rng.integers(SYSTEMS)]}
        yield [system], [_text(rng, 120) for _ in range(TURNS)]


def _text(rng: np.random.Generator, letters: int) -> str:
    return " ".join(rng.choice(WORDS, letters // 6).tolist())[:letters]
