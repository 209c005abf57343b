"""One engine of the demo model behind one server, for all tests of a file."""

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
