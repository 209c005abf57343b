"""``outpace learn``: speculative decoding explained on real runs, in a page."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any

from outpace.cli.command import Command
from outpace.cli.options import Common, Load
from outpace.common.parameter import option
from outpace.errors import Argument, ParameterError

DRAFTERS = ("none", "ngram", "suffix", "recycle", "lookahead", "layers:22", "eagle:demo", "model:demo-draft")


def run(
    common: Common,
    load: Load,
    record: Annotated[
        bool, option("Run everything here, on this machine (a minute or two), instead of showing the runs that ship.")
    ] = False,
    drafter: Annotated[
        list[str] | None,
        option(
            "With --record: what drafts; repeatable. The last one samples, too.", "--drafter", "-d", group="drafting"
        ),
    ] = None,
    out: Annotated[Path, option("The page to write.", "--out", "-o")] = Path("outpace-learn.html"),
    data: Annotated[Path | None, option("Write the runs as JSON, too.", metavar="FILE")] = None,
    no_open: Annotated[bool, option("Do not open the page in a browser.")] = False,
) -> int:
    """Explain speculative decoding on real runs: ten chapters, each with something to move.

    Writes one HTML page, which asks for nothing outside itself. With --record, the runs are of this machine and of
    --model.
    """
    from outpace.common.files import check_writable, write_json
    from outpace.measure.learn import recorded, write

    if not record and (load.model != "demo" or drafter):
        name = Argument("drafter", drafter[0]) if drafter else Argument("model", load.model)
        raise ParameterError(name, " is for runs of your own: give --record, too")
    fitting = DRAFTERS if load.model == "demo" else ("none", "ngram", "suffix")
    names = ["none", *(drafter or fitting[1:])]
    if "none" in names[1:]:
        raise ParameterError(Argument("drafter", "none"), " is recorded in any case: name what drafts")
    if len(set(names)) < len(names):
        raise ParameterError(Argument("drafter", max(names, key=names.count)), " is there twice: name each once")
    check_writable(out, "HTML")
    if data is not None:
        check_writable(data, "JSON")
        if data.resolve() == out.resolve():
            raise ParameterError(Argument("data", str(data)), " is the page itself: give another name")
    if record:
        from outpace.measure.learn.record import REPEATS, fastest

        runs = fastest([_once(load, names, f"{i} of {REPEATS}") for i in range(1, REPEATS + 1)])
    else:
        runs = recorded()
    if data is not None:
        write_json(data, runs)
    write(out, runs)
    size = out.stat().st_size
    if not common.emit({"page": str(out), "bytes": size}):
        print(f"{out}: {size / 1e3:.0f} kB, open it in a browser")
        if not no_open and sys.stdout.isatty():
            webbrowser.open(out.resolve().as_uri())
    return 0


def _once(load: Load, names: list[str], which: str) -> dict[str, Any]:
    """All runs, with engines that remember nothing."""
    from outpace.measure.learn import record

    engines = load.engines(names, prefix_rows=0, size=record.TREE)
    try:
        return record.record(
            dict(zip(names, engines, strict=True)), lambda text: print(f"recording {which}, {text}", file=sys.stderr)
        )
    finally:
        for engine in engines:
            engine.close()


COMMAND = Command(
    "learn",
    run,
    "outpace learn\n"
    "outpace learn --record -o mine.html\n"
    "outpace learn --record -m model.gguf -d ngram -d suffix --data runs.json",
)
