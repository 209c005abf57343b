"""Whether work gives up the interpreter while it lasts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable


def lets_others_run(work: Callable[[], object]) -> bool:
    """Whether another thread had its turn before ``work``, long and in a thread of its own, was over. Nobody is
    interrupted meanwhile: others run only where it gives up the interpreter."""
    begun, over, usual = threading.Event(), list[object](), sys.getswitchinterval()

    def run() -> None:
        begun.set()
        over.append(work())

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        begun.wait()
        found = not over
    finally:
        sys.setswitchinterval(usual)
        thread.join()
    assert over, "it raised"
    return found
