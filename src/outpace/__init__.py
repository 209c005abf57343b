"""Outpace: speculative decoding of language models. The same tokens, sooner."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outpace.common.version import __version__

if TYPE_CHECKING:
    from outpace.engine.aio import AsyncEngine
    from outpace.engine.engine import Engine
    from outpace.engine.results import Delta, Result
    from outpace.engine.statistics import Stats
    from outpace.errors import (
        ComplexityError,
        DrafterError,
        GrammarError,
        MemoryLimitError,
        ModelError,
        OutpaceError,
        ParameterError,
        RuleError,
    )
    from outpace.exact.sampling import TokenLogprob
    from outpace.integrations.transformers import PatchStats, generate, patch, stats, unpatch
    from outpace.params import GrammarRule, LogitRule, SamplingParams
    from outpace.text.grammar import Grammars


_HOME = {
    "AsyncEngine": "engine.aio",
    "ComplexityError": "errors",
    "Delta": "engine.results",
    "DrafterError": "errors",
    "Engine": "engine.engine",
    "GrammarError": "errors",
    "GrammarRule": "params",
    "Grammars": "text.grammar",
    "LogitRule": "params",
    "MemoryLimitError": "errors",
    "ModelError": "errors",
    "OutpaceError": "errors",
    "ParameterError": "errors",
    "PatchStats": "integrations.transformers",
    "Result": "engine.results",
    "RuleError": "errors",
    "SamplingParams": "params",
    "Stats": "engine.statistics",
    "TokenLogprob": "exact.sampling",
    "generate": "integrations.transformers",
    "patch": "integrations.transformers",
    "stats": "integrations.transformers",
    "unpatch": "integrations.transformers",
}
__all__ = [
    "AsyncEngine",
    "ComplexityError",
    "Delta",
    "DrafterError",
    "Engine",
    "GrammarError",
    "GrammarRule",
    "Grammars",
    "LogitRule",
    "MemoryLimitError",
    "ModelError",
    "OutpaceError",
    "ParameterError",
    "PatchStats",
    "Result",
    "RuleError",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
    "__version__",
    "generate",
    "patch",
    "stats",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that ``import outpace`` stays instant."""
    if name not in _HOME:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    try:
        return getattr(import_module(f"outpace.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        from outpace.common.installing import install
        from outpace.errors import MissingExtraError

        raise MissingExtraError(
            f"outpace.{name} is for transformers models and needs {error.name}: {install('outpace[torch]')}; "
            'for text, outpace.Engine.load("demo").generate("Hello") needs neither'
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
