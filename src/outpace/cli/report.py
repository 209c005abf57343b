"""``outpace report``: a page from the results of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.common.parameter import argument, option
from outpace.errors import ParameterError

_COUNTS = "Decode speed of one answer, tokens/s: each engine at its fastest"


def run(
    common: Common,
    results: Annotated[
        list[Path], argument("What peers, serving, invariance, prove, scores or bench wrote with --json.")
    ],
    out: Annotated[Path, option("The page to write.", "--out", "-o")] = Path("report.html"),
    chart: Annotated[
        Path | None,
        option("Draw what peers measured, each at its fastest: NAME-light.svg, NAME-dark.svg.", metavar="NAME"),
    ] = None,
    keep: Annotated[Path | None, option("Copy the results there without single answers.", metavar="FOLDER")] = None,
) -> int:
    """Write one HTML page from benchmarks' results: figures, machines side by side, versions and commands."""
    from outpace.common.files import check_writable, write_bytes, write_json
    from outpace.measure.page import bars, write
    from outpace.measure.report import DETAILS, fastest, read, sections

    check_writable(out, "HTML")
    themes = () if chart is None else tuple(chart.with_name(f"{chart.name}-{theme}.svg") for theme in ("light", "dark"))
    for picture in themes:
        check_writable(picture, "SVG")
    found = [read(path) for path in results]
    write(out, "Outpace, measured", sections(found))
    written = [out]
    if chart is not None:
        drawn = next((result for result in found if "table" in result.value), None)
        if drawn is None:
            raise ParameterError("--chart draws what peers measured: give that file, too")
        for theme, path in zip(("light", "dark"), themes, strict=True):
            drawing = bars(fastest(drawn.value), _COUNTS, f"{drawn.about}. {drawn.machine}, {drawn.day}", theme)
            write_bytes(path, drawing.encode())
        written += themes
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for result in found:
            written.append(keep / result.path.name)
            write_json(written[-1], {key: each for key, each in result.value.items() if key not in DETAILS})
    if not common.emit({"written": [str(path) for path in written]}):
        print("\n".join(map(str, written)))
    return 0


COMMAND = Command("report", run, "outpace report docs/results/peers.json serving.json -o report.html")
