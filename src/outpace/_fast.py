"""The C++ extension, ``outpace._native``, which every part of the package needs: loaded and checked in one place.

A missing extension and one that was built before this Python are errors with their remedy. Its types are in
``_native.pyi``, which its build writes (native/CMakeLists.txt).
"""

from __future__ import annotations

from outpace.common.installing import install
from outpace.errors import ModelError

INTERFACE = 63  # raised with every change of what the extension offers; its build takes the number from here


def _remedy() -> str:
    return f"build it again with a C++17 compiler: {install('outpace[serve]')}"


try:
    import outpace._native as native
except ImportError as error:
    raise ModelError(f"the C++ extension of outpace does not load ({error}): {_remedy()}") from error
if (_built := getattr(native, "INTERFACE", 1)) != INTERFACE:
    raise ModelError(f"the native extension is of interface {_built}, this Python needs {INTERFACE}: {_remedy()}")

__all__ = ["INTERFACE", "native"]
