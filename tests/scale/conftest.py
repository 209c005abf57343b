"""Tests that need an environment of their own: ``scripts/scale`` makes it and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.scale import Replicas, replicas

PYTHON = os.environ.get("OUTPACE_SCALE_PYTHON", "")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def ray() -> Iterator[Replicas]:
    """Two replicas of the demo model."""
    with replicas(PYTHON, "2", "--max-length", "1024", "--drafter", "ngram") as running:
        yield running
