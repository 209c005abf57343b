"""Reads one mutation after another, in a process of its own: ``python -m tests.fuzz.child``; see ``__main__``.

Writes the number of the mutation that it is at, and appends a line of JSON for each that was not refused as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import numpy as np

from outpace.errors import OutpaceError
from tests.fuzz.mutations import Edit, applied, mutation
from tests.fuzz.seeds import Files
from tests.fuzz.targets import TARGETS, Target

SECONDS = 2.0  # of processor time
MEMORY = 1 << 29  # bytes that one input may take
KEPT = Path(__file__).parent / "kept.json"


class TooLong(BaseException):
    """An input took more than SECONDS."""


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TooLong


def chosen(names: Sequence[str], seed: int, number: int) -> tuple[str, str, list[Edit]]:
    """The target, one after another of ``names``, the seed and the edits of mutation ``number``: always the same."""
    name = names[number % len(names)]
    rng = random.Random(f"{name} {seed} {number}")
    seeds = TARGETS[name].seeds()
    which = rng.choice(sorted(seeds))
    return name, which, mutation(seeds[which], rng)


def peak() -> int:
    """Bytes of memory that the process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(target: Target, files: Files, folder: Path) -> tuple[str, str | None]:
    """How a read ended, "read" or "refused", and what was wrong with that (None: nothing)."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    for file, data in files.items():
        (folder / file).write_bytes(data)
    before = peak()
    outcome, fault = "read", None
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(folder)
    except OutpaceError as error:
        outcome, fault = "refused", None if str(error).strip() else "an error without a message"
    except TooLong:
        fault = f"took more than {SECONDS:g} seconds"
    except BaseException as error:  # a library's panic is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        fault = "".join(traceback.format_exception(error)[-3:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if peak() - before > MEMORY:
        fault = f"took {(peak() - before) >> 20} MiB"
    return outcome, fault


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+", choices=list(TARGETS))
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--at", required=True, help="file that has the number of the current mutation")
    parser.add_argument("--log", required=True)
    arguments = parser.parse_args()
    np.seterr(all="ignore")
    os.environ["OUTPACE_CACHE"] = os.devnull + "/none"  # what is derived from a mutation is not kept
    signal.signal(signal.SIGPROF, _too_long)
    if not {"asan", "tsan"} & set(os.environ.get("LD_PRELOAD", "").replace("lib", " ").replace(".", " ").split()):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), used + (2 << 30)))
    position = os.open(arguments.at, os.O_WRONLY | os.O_CREAT)
    counts = {"read": 0, "refused": 0}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as work:
        folder = Path(work) / "input"
        for number in range(arguments.first, arguments.first + arguments.count):
            os.pwrite(position, b"%20d" % number, 0)
            name, which, edits = chosen(arguments.targets, arguments.seed, number)
            target = TARGETS[name]
            outcome, fault = attempt(target, applied(target.seeds()[which], edits), folder)
            counts[outcome] += 1
            if fault is not None:
                found = {"number": number, "target": name, "seed": which, "edits": edits, "fault": fault}
                with open(arguments.log, "a", encoding="utf-8") as log:
                    log.write(json.dumps(found) + "\n")
    os.pwrite(position, b"%20d" % (arguments.first + arguments.count), 0)
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
