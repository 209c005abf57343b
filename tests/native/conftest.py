"""The native runtime's tests: every instruction-set path of this machine, and small models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from native_helpers import Tiny

from outpace import _native


def isas() -> list[str]:
    """The instruction-set paths of this machine."""
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
