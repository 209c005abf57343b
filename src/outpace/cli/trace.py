"""``outpace trace``: run a recorded run again, or look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command, Group
from outpace.cli.options import Common
from outpace.common.parameter import argument, option

FILE = argument("A trace, as outpace generate --trace wrote it.")
MODEL = option("The target, where it is not the one that the trace names.", "--model", "-m")
THREADS = option("CPU threads. Default: as recorded, else the cores there are.", "--threads", "-t")


def replay(
    common: Common,
    file: Annotated[Path, FILE],
    model: Annotated[str | None, MODEL] = None,
    threads: Annotated[int | None, THREADS] = None,
) -> int:
    """Decode again with the recorded drafts, and check every token and verdict. Exit code 1 for a difference."""
    from outpace.measure.replay import engine_for
    from outpace.measure.replay import replay as run
    from outpace.measure.trace import read

    trace = read(file)
    with engine_for(trace, model, threads=threads) as (engine, drafter):
        report = run(trace, engine, drafter)
    if common.emit({**report.to_dict(), "cut": trace.cut}):
        return 0 if report.identical else 1
    for departure in report.departures:
        print(departure)
    for _, reason in report.skipped:
        print(f"skipped: {reason}")
    for note in report.notes:
        print(f"not as it was: {note}")
    if trace.cut:
        print(f"{file} is not whole: {trace.cut}")
    if report.identical:
        print(f"identical: {report.tokens} tokens of {report.samples} answers in {report.steps} steps")
    else:
        print(f"{len(report.departures)} of {report.samples} answers differ")
    return 0 if report.identical else 1


def view(
    common: Common,
    file: Annotated[Path, FILE],
    beside: Annotated[list[Path] | None, option("Another trace, side by side.", metavar="FILE")] = None,
    out: Annotated[Path | None, option("The page to write. Default: beside FILE, with .html.", "--out", "-o")] = None,
) -> int:
    """Write one HTML page that shows every step. It holds everything, and asks for nothing outside itself."""
    from outpace.common.files import check_writable
    from outpace.measure.view import write

    out = file.with_suffix(".html") if out is None else out
    check_writable(out, "HTML")
    write(file, out, *(beside or ()))
    size = out.stat().st_size
    if not common.emit({"page": str(out), "bytes": size}):
        print(f"{out}: {size / 1e6:.1f} MB, open it in a browser")
    return 0


COMMAND = Group(
    "trace",
    "Replay or view what outpace generate --trace FILE recorded.",
    "outpace generate 'Count to ten.' --trace run.trace\noutpace trace view run.trace\noutpace trace replay run.trace",
    (
        Command(
            "replay",
            replay,
            "outpace generate 'Count to ten.' --trace run.trace\n"
            "outpace trace replay run.trace\n"
            "outpace trace replay run.trace --model copy.gguf --json replayed.json",
        ),
        Command(
            "view",
            view,
            "outpace generate 'Count to ten.' --trace run.trace --trace-probabilities\n"
            "outpace trace view run.trace -o run.html\n"
            "outpace trace view drafted.trace --beside plain.trace -o both.html",
        ),
    ),
)
