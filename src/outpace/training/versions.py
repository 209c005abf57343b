"""A drafter that is replaced while others read it: a link to the newest of some folders.

``NAME`` leads to ``.NAME.versions/N``. To replace it is one call, so that a reader, and a kill, finds the old one or
the new one; the one before stays for who reads it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.common.files import write_json
from outpace.errors import Argument, DataError

HISTORY = "online.json"


class Versions:
    """The drafter that a link leads to, and the folder beside it where versions lie. Raises DataError, OSError."""

    def __init__(self, link: Path) -> None:
        self.link = link.absolute()
        self.folder = self.link.parent / f".{self.link.name}.versions"
        ours = self.link.is_symlink() and self.link.resolve().parent == self.folder.resolve()
        if (self.link.exists() or self.link.is_symlink()) and not ours:
            raise DataError(
                f"{link} is there and is no drafter that was tuned online: give another folder as ", Argument("out")
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def newest(self) -> Path | None:
        return self.link.resolve() if self.link.exists() else None

    def publish(self, made: Path) -> None:
        """Let the link lead to ``made``, which is moved: at once, or not at all."""
        there = {int(path.name) for path in self.folder.iterdir() if path.name.isdigit()}
        number, before = max(there, default=0) + 1, self.newest
        made.rename(self.folder / str(number))
        part = self.folder / "link"
        part.unlink(missing_ok=True)  # of a kill
        part.symlink_to(Path(self.folder.name) / str(number))
        _flushed(self.folder)
        part.replace(self.link)
        for old in there:  # the one before stays for who reads it
            if before is None or before.name != str(old):
                shutil.rmtree(self.folder / str(old))

    def note(self, row: Mapping[str, Any]) -> None:
        """Add a round to the history."""
        rows = _history(self.folder / HISTORY)
        write_json(self.folder / HISTORY, [*rows, {"time": round(time.time()), **row}][-1000:])


def _history(path: Path) -> list[Mapping[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def _flushed(folder: Path) -> None:
    """Wait until the disk knows the folder's names."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
