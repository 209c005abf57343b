"""GGUF files that were downloaded from a hub by name: which there are, and their removal.

Whole repositories are kept by huggingface_hub, whose ``hf cache`` lists and removes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outpace.common.files import cache_dir, locked
from outpace.errors import Argument, ParameterError
from outpace.models.hub import label


@dataclass(frozen=True, slots=True)
class Download:
    """The files of one model, in a folder of their own. ``bytes``: on the disk, of what is unfinished too."""

    name: str  # as --model takes it
    path: Path
    bytes: int
    whole: bool  # False: the download was cut, and goes on where it stopped


def folder() -> Path:
    """Where they are kept."""
    return cache_dir() / "hub"


def found() -> list[Download]:
    """All there are, by name."""
    its = []
    for place in sorted(folder().glob("*/*/")):
        files = [path for path in sorted(place.iterdir()) if path.name.endswith((".gguf", ".gguf.part"))]
        if files:
            repo = place.parent.name.replace("--", "/", 1)  # no user's name has two dashes
            bytes_ = sum(path.stat().st_size for path in files)
            whole = all(path.suffix == ".gguf" for path in files)
            its.append(Download(f"{repo}:{label(files[0].name.removesuffix('.part'))}", place, bytes_, whole))
    return sorted(its, key=lambda one: one.name.lower())


def remove(names: Sequence[str]) -> int:
    """Delete the models of these names, whatever their case; "user/repo" is all of a repository. How many bytes that
    freed. Waits for a download from the same repository. Raises ParameterError for a name that is not there, before
    anything is deleted; OSError."""
    there, chosen = found(), dict[Path, Download]()
    for name in names:
        fits = [its for its in there if name.lower() in (its.name.lower(), its.name.partition(":")[0].lower())]
        if not fits:
            named = ", ".join(its.name for its in there) or "none"
            raise ParameterError(Argument("remove", name), f" was not downloaded: there is {named}")
        chosen |= {its.path: its for its in fits}
    for path in chosen:
        with locked(path.parent / ".lock"):
            shutil.rmtree(path)
    return sum(its.bytes for its in chosen.values())
