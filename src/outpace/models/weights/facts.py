"""Numbers of a description that somebody else wrote (GGUF metadata, config.json), checked as they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.errors import ModelError


class Facts:
    """Values by key, untrusted. ``verdict``: what a message says of ``name`` before the problem."""

    def __init__(self, name: str, facts: Mapping[str, Any], prefix: str = "", verdict: str = "cannot be read") -> None:
        self.name, self.prefix, self._facts, self._verdict = name, prefix, facts, verdict
        self._read: set[str] = set()

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.name} {self._verdict}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self.prefix + key)
        value = self._facts.get(self.prefix + key)
        return default if value is None else value

    @property
    def all(self) -> dict[str, Any]:
        return dict(self._facts)

    def unread(self) -> dict[str, Any]:
        """What nobody has asked for so far, of keys with the prefix, which is left out here."""
        left = self._facts.keys() - self._read
        return {key[len(self.prefix) :]: self._facts[key] for key in sorted(left) if key.startswith(self.prefix)}

    def whole(self, key: str, default: int | None = None, most: int = 1 << 30, least: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(f"{self.prefix}{key} is {brief(value)}, not a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise self.fail(f"{self.prefix}{key} is {brief(value)}, not a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of so many positive numbers."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(f"{self.prefix}{key} is {brief(value)}, not a list of {count} numbers")
        return [self.about({key: each}).number(key) for each in value]

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{self.prefix}{key} is {brief(value)}, neither true nor false")
        return value

    def listed(self, key: str) -> list[str]:
        """The texts of a list; none where there is no list."""
        value = self.get(key)
        return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []

    def part(self, key: str) -> Facts:
        """The object at ``key``; an empty one where there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.fail(f"{self.prefix}{key} is {brief(value)}, not an object")
        return self.about(value)

    def about(self, facts: Mapping[str, Any]) -> Facts:
        """Others of the same thing, whose keys stand as they are."""
        return Facts(self.name, facts, verdict=self._verdict)


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises ModelError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not an object: download it again")
    return config


def brief(value: Any) -> str:
    """A value as a message shows it: texts whole, as names and paths are; of longer ones both ends."""
    text = repr(value)
    if isinstance(value, str):
        return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"
    return text if len(text) <= 40 else f"a {type(value).__name__}"
