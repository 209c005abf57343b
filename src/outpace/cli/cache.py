"""``outpace cache``: what is kept so that models start at once: files from a hub, packed weights, measured drafters."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.common.parameter import option
from outpace.errors import Argument, ParameterError


def run(
    common: Common,
    clear: Annotated[bool, option("Delete all packed weights; models that are running keep theirs.")] = False,
    cache_dir: Annotated[
        Path | None, option("Of that folder of outpace serve --cache-dir, instead: by model.", metavar="DIR")
    ] = None,
    remove: Annotated[
        list[str] | None, option("Delete a download: user/repo:Q4_K_M, or user/repo. Repeatable.", metavar="NAME")
    ] = None,
    forget: Annotated[
        bool, option("Forget which drafters outpace drafters --measure found fastest: auto is as before.")
    ] = False,
) -> int:
    """List downloads, the packed weights that are kept and the drafters that auto stands for, or delete them;
    outpace rm NAME deletes a model.

    OUTPACE_CACHE is the folder of all but downloads, OUTPACE_WEIGHT_CACHE another one of the weights, or 0 for none."""
    if cache_dir is not None:
        if remove or forget:
            other = Argument("remove") if remove else Argument("forget", True)
            raise ParameterError(Argument("cache_dir"), " is of servers' prompts alone: leave it out for ", other)
        return _prompts(cache_dir, clear, common)
    from outpace.common.units import format_bytes
    from outpace.drafters import measured
    from outpace.models.native import weight_cache
    from outpace.models.weights import downloads

    removed = downloads.remove(remove) if remove else None
    forgotten = measured.forget() if forget else None
    remembered = measured.entries()
    fetched = downloads.found()
    where, limit = weight_cache.folder(), weight_cache.limit()
    freed = weight_cache.clear(where) if clear and where is not None else None
    found = [] if where is None else weight_cache.entries(where)
    if common.json is not None:
        files = [
            {"path": str(e.path), "model": e.name, "bytes": e.bytes, "used": e.used, "made_of": e.key} for e in found
        ]
        named = [{"name": e.name, "path": str(e.paths[0]), "bytes": e.bytes, "whole": e.whole} for e in fetched]
        packed = {"folder": where and str(where), "limit": limit, "freed": freed, "files": files}
        autos = [{"path": str(path), "model": name, **asdict(best)} for path, name, best in remembered]
        listed = {"removed": removed, "downloads": named, "forgotten": forgotten, "measured": autos}
        if common.emit({**packed, **listed}):
            return 0
    if removed is not None:
        print(f"{format_bytes(removed)} removed")
    for each in fetched:
        print(f"{format_bytes(each.bytes):>10}  {'download' if each.whole else 'cut off':<8}  {each.name}")
    print(f"{format_bytes(downloads.size(fetched)):>10}  from hubs in {downloads.folder()}")
    if forgotten is not None:
        print(f"{forgotten} measured {'drafter' if forgotten == 1 else 'drafters'} forgotten")
    for _, name, best in remembered:
        print(f"{'auto':>10}  {best.spec or 'suffix'} beside {name}: {best.why}")
    if where is None:
        print("no packed weights are kept (OUTPACE_WEIGHT_CACHE=0)")
        return 0
    if freed is not None:
        print(f"{format_bytes(freed)} freed")
    for entry in found:
        target = "unusable" if entry.key is None else entry.key["target"]
        print(f"{format_bytes(entry.bytes):>10}  {target:<8}  {entry.name}")
    total = format_bytes(sum(entry.bytes for entry in found))
    print(f"{total:>10}  of {format_bytes(limit)} in {where}")
    return 0


def _prompts(folder: Path, clear: bool, common: Common) -> int:
    from outpace.common.units import format_bytes
    from outpace.engine import kv_files

    if not folder.is_dir():
        raise ParameterError(
            Argument("cache_dir", str(folder)), " is no folder: give that of outpace serve --cache-dir"
        )
    freed = kv_files.clear(folder) if clear else None
    models = kv_files.models(folder)
    listed = [{"path": str(path), "model": name, "files": files, "bytes": size} for path, name, files, size in models]
    if common.emit({"folder": str(folder), "freed": freed, "models": listed}):
        return 0
    if freed is not None:
        print(f"{format_bytes(freed)} freed")
    for _, name, count, size in models:
        print(f"{format_bytes(size):>10}  {count:>8} files  {name}")
    print(f"{format_bytes(sum(size for *_, size in models)):>10}  of prompts in {folder}")
    return 0


COMMAND = Command(
    "cache",
    run,
    "outpace cache\n"
    "outpace cache --clear  # packed weights; --forget: what auto stands for\n"
    "outpace cache --remove user/repo:Q4_K_M",
)
