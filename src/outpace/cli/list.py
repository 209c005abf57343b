"""``outpace list``: the models that are here, a line each."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.cli.terminal import table


@dataclass(slots=True)
class _Model:
    name: str  # as --model takes it
    bytes: int
    type: str
    used: float  # when, as time.time() counts


def run(common: Common) -> int:
    """List the models that are here: downloads, the demo models that are installed, and files whose weights are kept
    packed. outpace cache says what all of it takes."""
    from outpace.common.units import format_ago, format_bytes

    models = sorted(_models().values(), key=lambda model: -model.used)
    if common.emit({"models": [asdict(model) for model in models]}):
        return 0
    if not models:
        print("no model is here: outpace pull user/repo:Q4_K_M downloads one")
        return 0
    rows = [[model.name, model.type, format_bytes(model.bytes), format_ago(model.used)] for model in models]
    print(table(["model", "type", "size", "used"], rows, left=2))
    return 0


def _models() -> dict[Path, _Model]:
    """By their first file, all links resolved."""
    from outpace.common.files import cache_dir
    from outpace.models import demo
    from outpace.models.native import weight_cache
    from outpace.models.weights import downloads

    found: dict[Path, _Model] = {}
    for name, file in demo.installed(cache_dir()).items():
        stat = file.stat()
        found[file.resolve()] = _Model(name, stat.st_size, downloads.type_of(file), max(stat.st_atime, stat.st_mtime))
    for each in downloads.found():
        kind = each.type if each.whole else f"{each.type}, cut off"
        found[Path(os.path.realpath(each.paths[0]))] = _Model(each.name, each.bytes, kind, each.used)
    where = weight_cache.folder()
    for entry in [] if where is None else weight_cache.entries(where):
        paths = [Path(file[0]) for file in entry.key["files"]] if entry.key is not None else []
        if not paths or not all(path.is_file() for path in paths):  # weights of a model that has gone
            continue
        known = found.get(paths[0])
        if known is None:
            gguf = paths[0].suffix == ".gguf"
            where_it_lies, kind = (paths[0], downloads.type_of(paths[0])) if gguf else (paths[0].parent, "safetensors")
            size = sum(file.stat().st_size for file in paths)
            known = found[paths[0]] = _Model(str(where_it_lies), size, kind, entry.used)
        known.used = max(known.used, entry.used)
    return found


COMMAND = Command("list", run, "outpace list\noutpace list --json\noutpace list --json models.json")
