"""One server of the demo model, and one engine that says what its answers have to be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outpace import Engine
from tests.server.serving import Running, serving


@pytest.fixture(scope="session")
def demo() -> Iterator[Running]:
    """The demo model, served."""
    with serving(Engine.load("demo", drafter="ngram+suffix", max_length=2048)) as running:
        yield running


@pytest.fixture(scope="session")
def plain() -> Iterator[Engine]:
    """The demo model, decoding plainly, each prompt from its beginning."""
    with Engine.load("demo", drafter="none", max_length=2048, prefix_rows=0) as engine:
        yield engine
