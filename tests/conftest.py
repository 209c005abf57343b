"""What all tests need."""

import os
import signal

import pytest

# Two processes of tests on two cores, whose torch would start two threads each: a third of the time, they would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def ctrl_c() -> None:
    """A shell that starts tests in the background has them ignore Ctrl-C, as does a command that was interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
