"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from outpace.errors import ParameterError


def check_writable(path: Path) -> None:
    """Raise ParameterError now if ``path`` could not be written later."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise ParameterError(f"{path} cannot be written: give a file in a folder that exists and is writable")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
            file.write("\n")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def cache_dir() -> Path:
    """Where derived files are kept: ``OUTPACE_CACHE``, or ``~/.cache/outpace``."""
    named = os.environ.get("OUTPACE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "outpace"
