"""A plugin for pytest, with which llama.cpp's server tests run against ``llama-server`` beside this file."""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from requests.structures import CaseInsensitiveDict

os.environ["LLAMA_SERVER_BIN_PATH"] = str(Path(__file__).with_name("llama-server"))
sys.modules["wget"] = ModuleType("wget")
_KEPT = 3
_servers: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import utils

    theirs = utils.ServerProcess
    start, stop = theirs.start, theirs.stop

    def started(server: Any, timeout_seconds: int = 60) -> None:
        """A server with the same options goes on: starting one costs seconds."""
        server.server_port = 0
        options = tuple(sorted((name, str(value)) for name, value in vars(server).items()))
        kept = _servers.get(options)
        if kept is None or kept.process.poll() is not None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                server.server_port = free.getsockname()[1]
            start(server, timeout_seconds)
            _servers[options] = kept = theirs.__new__(theirs)
            vars(kept).update(vars(server))
            while len(_servers) > _KEPT:
                stop(_servers.popitem(last=False)[1])
        _servers.move_to_end(options)
        server.server_port = kept.server_port

    def requested(*given: Any, **named: Any) -> Any:
        """Names of headers have capitals or not."""
        answer = request(*given, **named)
        answer.headers = CaseInsensitiveDict(answer.headers)
        return answer

    request = theirs.make_request
    theirs.start, theirs.stop, theirs.make_request = started, lambda server: None, requested
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    for item in items:
        if hasattr(item.module, "MODEL_DRAFT_FILE_URL"):
            item.module.download_file = lambda url: url


def pytest_sessionfinish() -> None:
    for server in _servers.values():
        server.process.terminate()
        server.process.wait(10)
