"""The one place that chooses between the C++ extension and Python references of what is hot, and says what it chose.

A module that has both asks ``pick(name, reference)``: the extension's function or class of that name, or the
reference where there is no extension. An extension from before this Python is an error, never a silent fallback.
"""

from __future__ import annotations

from typing import Any, TypeVar

from outpace.errors import ModelError

INTERFACE = 7  # raised with every change of what the extension offers; native/bindings/module.cpp says its own
REMEDY = "build it again: ./scripts/setup, or pip install --no-build-isolation -e ."

T = TypeVar("T")

try:
    from outpace import _native
except ImportError:  # no C++ compiler at installation
    _native = None  # type: ignore[assignment]

_chosen: dict[str, str] = {}


def _checked(native: Any) -> Any:
    built = getattr(native, "INTERFACE", 1)
    if built != INTERFACE:
        raise ModelError(f"the native extension is of interface {built}, this Python needs {INTERFACE}: {REMEDY}")
    return native


native: Any = None if _native is None else _checked(_native)


def pick(name: str, reference: T) -> T:
    """The extension's ``name``, or ``reference`` where there is no extension."""
    _chosen[name] = "python" if native is None else "native"
    return reference if native is None else getattr(native, name)


def chosen() -> dict[str, str]:
    """What was picked so far, by name: "native" or "python"."""
    return dict(_chosen)
