"""What ``outpace drafters --measure`` found for a model on this machine: kept on disk, for ``auto`` to read."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from outpace.common.files import cache_dir, write_json
from outpace.models import host
from outpace.models.fingerprint import fingerprint_of
from outpace.models.options import LoadOptions

log = logging.getLogger(__name__)

VERSION = 1  # of the file's format


@dataclass(frozen=True, slots=True)
class Measured:
    """The fastest drafter, sizes chosen by the policy. ``spec``: "" where none was faster than plain decoding for sure.
    ``ratio``, ``low``, ``high``: its speed over plain decoding's with the 95 % interval; ``prompts`` of ``day``."""

    spec: str
    ratio: float
    low: float
    high: float
    tokens_per_step: float
    prompts: int
    day: str

    @property
    def why(self) -> str:
        when = f"measured on {self.day} with {self.prompts} prompts"
        if not self.spec:
            return f"{when}: no drafter was faster than plain decoding for sure, and a lookup costs next to nothing"
        return (
            f"{when}: {self.ratio:.2f} times plain decoding ({self.low:.2f} to {self.high:.2f}), "
            f"{self.tokens_per_step:.2f} tokens a step"
        )


def keep(name: str, options: LoadOptions, found: Mapping[str, float] | None, spec: str, prompts: int) -> Path | None:
    """Remember the fastest ``spec`` for the model called ``name``, as it is loaded with ``options``; ``found``: its
    ratio, low, high and tokens_per_step (None: none was faster). The file, or None for a model without files. Raises
    OSError."""
    path = _path(name, options)
    if path is None:
        return None
    ratio, low, high, tokens = (found[part] if found else 1.0 for part in ("ratio", "low", "high", "tokens_per_step"))
    best = Measured(spec if found else "", ratio, low, high, tokens, prompts, time.strftime("%Y-%m-%d"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"version": VERSION, "model": name, "machine": platform.node(), **asdict(best)})
    return path


def known(name: str, options: LoadOptions) -> Measured | None:
    """What was kept for that model on this machine; None: nothing was measured."""
    path = _path(name, options) if _folder().is_dir() else None  # no look at the model's files for nothing
    found = None if path is None else _read(path)
    return None if found is None else found[1]


def entries() -> list[tuple[Path, str, Measured]]:
    """All that is kept: the file, the model's name when it was measured, and what was found."""
    found = ((path, _read(path)) for path in sorted(_folder().glob("*.json")))
    return [(path, *read) for path, read in found if read is not None]


def forget() -> int:
    """Delete all that is kept; how many files that were. Raises OSError."""
    paths = list(_folder().glob("*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


def _read(path: Path) -> tuple[str, Measured] | None:
    """The model's name and what was found; None where there is nothing usable, which is logged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return None
        ratio, low, high, tokens = (float(found[part]) for part in ("ratio", "low", "high", "tokens_per_step"))
        best = Measured(str(found["spec"]), ratio, low, high, tokens, int(found["prompts"]), str(found["day"]))
        return str(found["model"]), best
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not usable (%r): measure again with outpace drafters --measure", path, error)
        return None


def _folder() -> Path:
    return cache_dir() / "drafters"


def _path(name: str, options: LoadOptions) -> Path | None:
    fingerprint = fingerprint_of(name, options)
    if fingerprint is None:
        return None
    asked = (options.backend, options.dtype, options.device, options.quantize)
    key = json.dumps([fingerprint, *asked, platform.node(), host.kind()[0]])
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
