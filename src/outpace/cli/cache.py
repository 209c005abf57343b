"""``outpace cache``: the packed weights that are kept, so that models start at once."""

from __future__ import annotations

import json as json_
from typing import Annotated

import typer

from outpace.cli.command import flatten
from outpace.cli.options import Common


def register(app: typer.Typer) -> None:
    app.command("cache", epilog="Example: outpace cache --clear")(flatten(run))


def run(
    common: Common,
    clear: Annotated[bool, typer.Option("--clear", help="Delete them; models that are running keep theirs.")] = False,
) -> int:
    """List the packed weights that are kept, or delete them. OUTPACE_WEIGHT_CACHE is their folder, or 0 for none."""
    from outpace.models.native import weight_cache
    from outpace.units import format_bytes

    where, limit = weight_cache.folder(), weight_cache.limit()
    freed = weight_cache.clear(where) if clear and where is not None else None
    found = [] if where is None else weight_cache.entries(where)
    if common.json:
        files = [
            {"path": str(its.path), "model": its.name, "bytes": its.bytes, "used": its.used, "made_of": its.key}
            for its in found
        ]
        print(json_.dumps({"folder": where and str(where), "limit": limit, "freed": freed, "files": files}))
        return 0
    if where is None:
        print("no packed weights are kept (OUTPACE_WEIGHT_CACHE=0)")
        return 0
    if freed is not None:
        print(f"{format_bytes(freed)} freed")
    for its in found:
        target = "unusable" if its.key is None else its.key["target"]
        print(f"{format_bytes(its.bytes):>10}  {target:<8}  {its.name}")
    total = format_bytes(sum(its.bytes for its in found))
    print(f"{total:>10}  of {format_bytes(limit)} in {where}")
    return 0
