"""What a run has found so far, a JSON line each: one that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outpace.errors import Argument, ParameterError
from outpace.files import check_writable
from outpace.measure.remote import Answer, Token


class Journal:
    """Records by key. ``path``: None keeps them in memory alone; ``run``: what the run is, which has to be that of a
    file that is there. Raises ParameterError. Methods may be called from several threads."""

    def __init__(self, path: Path | None, run: Mapping[str, Any], say: Callable[[str], None]) -> None:
        self._found: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._file = None
        if path is None:
            return
        check_writable(path)
        if path.exists():
            self._resume(path, run, say)
        self._file = path.open("ab")
        if not self._found:
            self.add("run", dict(run))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> Any:
        return self._found[key]

    def get(self, key: str) -> Any:
        """None where there is nothing."""
        return self._found.get(key)

    def add(self, key: str, value: Any) -> None:
        """Keep a value of JSON."""
        line = json.dumps([key, value]).encode() + b"\n"
        with self._lock:
            self._found[key] = value
            if self._file is not None:
                self._file.write(line)
                self._file.flush()

    def _resume(self, path: Path, run: Mapping[str, Any], say: Callable[[str], None]) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        try:
            for line in content[:whole].splitlines():
                key, value = json.loads(line)
                self._found[key] = value
        except (ValueError, TypeError) as error:
            raise ParameterError(f"{path} is no journal of this benchmark: name another file") from error
        if (self._found or content) and self._found.get("run") != json.loads(json.dumps(run)):
            raise ParameterError(
                f"{path} is of a run with other servers, prompts or sizes: give those of then, or another ",
                Argument("journal"),
            )
        if whole < len(content):
            os.truncate(path, whole)
            say(f"{path}: the last line was cut short; what it was of is asked again")
        say(f"{path}: {len(self._found) - 1} answers are there already")


def told(answer: Answer) -> dict[str, Any]:
    """An answer as JSON."""
    return asdict(answer)


def read(value: Mapping[str, Any]) -> Answer:
    """What ``told`` made of it."""
    tokens = value["tokens"]
    return Answer(**{**value, "tokens": None if tokens is None else tuple(Token(**token) for token in tokens)})
