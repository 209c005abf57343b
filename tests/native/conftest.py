"""The native runtime's tests: skipped as a whole where the extension was not built."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from native_helpers import Tiny

from outpace.models.native import model as native

collect_ignore_glob = [] if native.available() else ["test_*.py"]


def isas() -> list[str]:
    """The instruction-set paths of this machine."""
    if not native.available():
        return []
    from outpace import _native

    return list(_native.usable_isas())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", isas())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(scope="session")
def tiny() -> Iterator[Tiny]:
    """Small random GGUF models by format, written once."""
    with Tiny() as models:
        yield models
