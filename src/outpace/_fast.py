"""The C++ extension, ``outpace._native``, which every part of the package needs: loaded and checked in one place.

A missing extension and one that was built before this Python are errors with their remedy.
"""

from __future__ import annotations

import importlib
from typing import Any

from outpace.common.installing import install
from outpace.errors import ModelError

INTERFACE = 23  # raised with every change of what the extension offers; native/bindings/module.cpp has the same number


def _remedy() -> str:
    return f"build it again with a C++17 compiler: {install('outpace[serve]')}"


def _load() -> Any:
    try:
        extension = importlib.import_module("outpace._native")
    except ImportError as error:
        raise ModelError(f"the C++ extension of outpace does not load ({error}): {_remedy()}") from error
    built = getattr(extension, "INTERFACE", 1)
    if built != INTERFACE:
        raise ModelError(f"the native extension is of interface {built}, this Python needs {INTERFACE}: {_remedy()}")
    return extension


native: Any = _load()
