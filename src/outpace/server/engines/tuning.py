"""A drafter that is tuned while the server runs: what was answered is recorded for it, and its new weights are taken.

Both are off by default. The engine's thread hands answers over and looks at a file's date; what is
written is written in another thread.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.errors import OutpaceError
from outpace.models.options import LoadOptions

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.server.engines.service import Service

log = logging.getLogger(__name__)

MOST_WAITING = 256  # answers that are to be recorded; what comes then is left out


class Apart:
    """Does jobs in a thread of its own, in their order; ``full`` counts those that it left out."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name="outpace-record", daemon=True)
        self.full = 0
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Have ``job`` called, unless too many wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            if not self.full:
                log.warning("answers come faster than they can be recorded: some are left out")
            self.full += 1

    def close(self) -> None:
        """Do what waits, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("an answer was not recorded")


@contextmanager
def recorded(engine: Engine, folder: Path | None, model: str, load: LoadOptions) -> Iterator[None]:
    """Record in ``folder``, where one is given, what ``engine`` answers in the block (training/record.py). Raises
    DataError before it begins."""
    if folder is None:
        yield
        return
    from outpace.training.record import recording

    apart = Apart()
    with recording(engine, folder, model=model, load=load, later=apart.put):
        try:
            yield
        finally:
            apart.close()


async def renewed(service: Service, every: float) -> None:
    """Until it is cancelled: let the drafters of models that are loaded take newer weights every so many seconds. What
    does not fit is logged once, and the old weights stay."""
    reported: dict[str, str] = {}
    while True:
        await asyncio.sleep(every)
        for name in service.models.names():
            known = service.known(name)
            if known is None or not known.serving.alive:
                continue
            try:
                if await known.serving.ask(lambda engine: engine.reload()):
                    log.info("%s: its drafter has new weights", name)
                reported.pop(name, None)
            except OutpaceError as error:
                if reported.get(name) != str(error):
                    log.warning("%s: its drafter keeps the weights that it has: %s", name, error)
                reported[name] = str(error)
