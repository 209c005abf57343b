"""What all tests need."""

import signal

import pytest


@pytest.fixture(autouse=True)
def ctrl_c() -> None:
    """A shell that starts tests in the background has them ignore Ctrl-C, as does a command that was interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
