"""A plugin for pytest, with which vLLM's tests of its server run against ``outpace serve`` without vLLM: what they
import of it is a stand-in, and their ``RemoteOpenAIServer`` is ours."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

_KEPT = 3
_servers: dict[tuple[str, ...], tuple[int, subprocess.Popen[bytes]]] = {}
_SAME = {"--max-model-len": "--max-length", "--max-num-seqs": "--max-rows"}


class StandIn(ModuleType):
    """A module of vLLM's: whatever is asked of it."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("get_tokenizer", "cached_tokenizer_from_config"):
            return tokenizer
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder(MetaPathFinder, Loader):
    """Finds vLLM's modules, and their helpers for a GPU."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        ours = name.split(".")[0] in ("vllm",) or name == "tests.utils"
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "tests.utils":
            module.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]


def tokenizer(*_: Any, **__: Any) -> Any:
    """The demo's, of transformers."""
    from transformers import AutoTokenizer

    from outpace.models.demo import smollm2
    from outpace.models.weights.gguf import GGUFFile
    from outpace.text.tokenizer import Tokenizer

    folder = mkdtemp()
    Tokenizer.from_gguf(GGUFFile.open(smollm2())).save(Path(folder))
    return AutoTokenizer.from_pretrained(folder)


class RemoteOpenAIServer:
    """``outpace serve`` under the name of their model. One with the same options goes on: starting it costs seconds."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], *, env_dict: Any = None, **_: Any) -> None:
        self.host = "127.0.0.1"
        command = ["-m", "demo", "--served-name", model, "--threads", "1", "--size", "4"]
        given, keys = iter(map(str, vllm_serve_args)), (env_dict or {}).get("VLLM_API_KEY", "")
        for each in given:
            name, _, value = each.partition("=")
            if name in _SAME:
                command += [_SAME[name], value or next(given)]
            elif name == "--api-key":
                keys = value or next(given)
            elif name == "--served-model-name":
                command += ["--alias", value or next(given)]
        options = (*command, keys)
        if options not in _servers:
            while len(_servers) >= _KEPT:
                _stop(_servers.pop(next(iter(_servers))))
            _servers[options] = _started(command, keys)
        self.port = _servers[options][0]

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    @property
    def url_root(self) -> str:
        """Without a path."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """A route's address."""
        return "/".join([self.url_root, *parts])

    def get_client(self, **given: Any) -> Any:
        """OpenAI's."""
        import openai

        return openai.OpenAI(**self._options(self.url_for("v1")) | given)

    def get_async_client(self, **given: Any) -> Any:
        """OpenAI's."""
        import openai

        return openai.AsyncOpenAI(**self._options(self.url_for("v1")) | given)

    def get_async_client_anthropic(self, **given: Any) -> Any:
        """Anthropic's."""
        import anthropic

        return anthropic.AsyncAnthropic(**self._options(self.url_root) | given)

    def _options(self, url: str) -> dict[str, Any]:
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600}


def _started(command: list[str], keys: str) -> tuple[int, subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "OUTPACE_API_KEYS": keys}
    program = [sys.executable, "-m", "outpace", "serve", "--port", str(port), *command]
    process = subprocess.Popen(program, env=environment)
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(program)} ended") from None
            time.sleep(0.05)
        else:
            return port, process
    raise TimeoutError(" ".join(program))


def _stop(server: tuple[int, subprocess.Popen[bytes]]) -> None:
    server[1].terminate()
    server[1].wait(30)


def pytest_sessionfinish() -> None:
    for server in _servers.values():
        _stop(server)


sys.modules["pybase64"] = base64  # the same, faster
sys.meta_path.insert(0, Finder())
