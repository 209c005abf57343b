"""``outpace report``: a page from the results of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.common.parameter import argument, option


def run(
    common: Common,
    results: Annotated[
        list[Path],
        argument("What bench or a benchmark (peers, forward, experts, serving, prove ...) wrote with --json."),
    ],
    out: Annotated[Path, option("The page to write.", "--out", "-o")] = Path("report.html"),
    chart: Annotated[
        Path | None,
        option("Draw the files of peers, or one of forward or experts: NAME-light.svg, NAME-dark.svg.", metavar="NAME"),
    ] = None,
    keep: Annotated[Path | None, option("Copy the results there without single answers.", metavar="FOLDER")] = None,
) -> int:
    """Write one HTML page from benchmarks' results: figures, machines side by side, versions and commands."""
    from outpace.common.files import check_writable, write_bytes, write_json
    from outpace.measure.page import write
    from outpace.measure.report import DETAILS, picture, read, sections

    check_writable(out, "HTML")
    themes = () if chart is None else tuple(chart.with_name(f"{chart.name}-{theme}.svg") for theme in ("light", "dark"))
    for path in themes:
        check_writable(path, "SVG")
    found = [read(path) for path in results]
    write(out, "Outpace, measured", sections(found))
    written = [out]
    if chart is not None:
        for theme, path in zip(("light", "dark"), themes, strict=True):
            write_bytes(path, picture(found, theme).encode())
        written += themes
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for result in found:
            written.append(keep / result.path.name)
            write_json(written[-1], {key: each for key, each in result.value.items() if key not in DETAILS})
    if not common.emit({"written": [str(path) for path in written]}):
        print("\n".join(map(str, written)))
    return 0


COMMAND = Command(
    "report",
    run,
    "outpace report docs/results/peers.json serving.json -o report.html\n"
    "outpace report here/*.json there/*.json --keep docs/results\n"
    "outpace report docs/results/peers.json --chart docs/images/speed",
)
