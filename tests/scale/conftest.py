"""Tests that need an environment of their own: ``scripts/scale`` makes it and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks.scale import Cluster, Replicas

PYTHON = os.environ.get("OUTPACE_SCALE_PYTHON", "")
OPTIONS = ("--max-length", "1024", "--drafter", "ngram")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def ray() -> Iterator[Replicas]:
    """Two replicas of the demo model."""
    with closing(Replicas(PYTHON, "2", *OPTIONS)) as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Ray of its own, which has no replicas yet."""
    with closing(Cluster(PYTHON)) as running:
        yield running
