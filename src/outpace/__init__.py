"""Outpace: speculative decoding of language models. The same tokens, sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.aio import AsyncEngine
    from outpace.engine import Engine
    from outpace.errors import (
        DrafterError,
        MemoryLimitError,
        ModelError,
        OutpaceError,
        ParameterError,
    )
    from outpace.rules import LogitRule
    from outpace.statistics import Stats
    from outpace.types import Delta, Result, SamplingParams, TokenLogprob

__version__ = "0.1.0"

_HOME = {
    "AsyncEngine": "aio",
    "Delta": "types",
    "DrafterError": "errors",
    "Engine": "engine",
    "LogitRule": "rules",
    "MemoryLimitError": "errors",
    "ModelError": "errors",
    "OutpaceError": "errors",
    "ParameterError": "errors",
    "Result": "types",
    "SamplingParams": "types",
    "Stats": "statistics",
    "TokenLogprob": "types",
}
__all__ = [
    "AsyncEngine",
    "Delta",
    "DrafterError",
    "Engine",
    "LogitRule",
    "MemoryLimitError",
    "ModelError",
    "OutpaceError",
    "ParameterError",
    "Result",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that ``import outpace`` stays instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    return getattr(import_module(f"outpace.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
