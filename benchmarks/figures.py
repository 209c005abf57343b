"""What every benchmark does with its figures: ``--json`` prints or writes them, and Ctrl-C leaves those there are."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from outpace.common.files import write_json
from outpace.common.version import __version__
from outpace.measure import machine

STANDARD_OUTPUT = Path("-")


def at_least_one(text: str) -> int:
    """The number of an option that counts what is measured; with 0 a benchmark would end well and show nothing."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give a whole number of at least 1")
    return int(text)


def add_json(parser: argparse.ArgumentParser, default: Path | None = None) -> None:
    """``--json``: print the figures as JSON, and the text on standard error; ``--json FILE``: write them there."""
    more = "" if default is None else f" ({default})"
    parser.add_argument(
        "--json", nargs="?", type=Path, const=STANDARD_OUTPUT, default=default, metavar="FILE",
        help=f"print the figures as JSON, or write them to FILE{more}",
    )  # fmt: skip


def emit(given: argparse.Namespace, value: Mapping[str, Any], *, partial: bool = False) -> None:
    """Give the figures where ``--json`` asks for them, and how they were made, for ``outpace report``. ``partial``:
    there will be more, so a file alone gets them."""
    if given.json is None:
        return
    value = {**made(), **value}
    if given.json != STANDARD_OUTPUT:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(given.json, value)
    elif not partial:
        print(json.dumps(value), file=given.standard_output, flush=True)


def made() -> dict[str, Any]:
    """Version, time, machine and command."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    return {"outpace": __version__, "time": now, "machine": machine.cpu(), "command": command}


class Measuring:
    """A block that Ctrl-C ends early, so that what was measured until then is reported like the rest."""

    stopped: KeyboardInterrupt | None = None

    def __enter__(self) -> Measuring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if isinstance(error, KeyboardInterrupt):
            self.stopped = error
        return self.stopped is not None

    def end(self, code: int) -> int:
        """The exit code; raises what stopped the block."""
        if self.stopped is not None:
            raise self.stopped
        return code
