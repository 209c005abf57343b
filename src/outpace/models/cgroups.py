"""The control groups that this process is in, version 2 and version 1: where a container's limits stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def group_folders(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """The groups of ``controller`` ("memory", "cpu") above this process, innermost first: (version, folder).

    Not every folder is there, nor has every one a limit.
    """
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            version, mounts = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, list(dict.fromkeys((f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}")))
        else:
            continue
        for mount in mounts:
            # A container may see its group at the mount's top though the path is the host's: go up from what is there.
            folder = root / mount / path.lstrip("/")
            while folder != root / mount:
                yield version, folder
                folder = folder.parent
            yield version, folder


def number(path: Path) -> int | None:
    """What a file holds, if that is a whole number from 0."""
    text = "".join(lines(path)).strip()
    return int(text) if text.isdecimal() else None


def lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []  # the caller goes by what is there
