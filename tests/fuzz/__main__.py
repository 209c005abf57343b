"""Mutation fuzzing of what reads files: ``python -m tests.fuzz --count 300000``.

Seeds are made by code, mutations follow from ``--seed`` and their number. Each target runs in a process with bounded
memory; one that crashes or hangs is named and the next mutation goes on in a new process. Exit status 1 where anything
but an OutpaceError came out. What once failed is kept in ``kept.json`` and tried by the tests.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.child import chosen
from tests.fuzz.targets import TARGETS

STUCK = 60.0  # seconds in which a process must come to its next mutation, on a busy machine too
START = 120.0  # and to its first


@dataclass
class Outcome:
    """How many were read and refused, and what should not have happened."""

    read: int = 0
    refused: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)


def fuzz(targets: Sequence[str], count: int, seed: int, first: int = 0) -> Outcome:
    """``count`` mutations, one target after another, from number ``first`` on."""
    outcome = Outcome()
    end = first + count
    with tempfile.TemporaryDirectory() as work:
        at, log, said, errors = (Path(work) / name for name in ("at", "log", "said", "errors"))
        while first < end:
            at.write_text("")
            arguments = ["--first", first, "--count", end - first, "--seed", seed, "--at", at, "--log", log]
            command = [sys.executable, "-m", "tests.fuzz.child", *targets, *map(str, arguments)]
            with said.open("wb") as out, errors.open("wb") as err:
                process = subprocess.Popen(command, stdout=out, stderr=err, cwd=Path(__file__).parents[2])
                stuck = _watch(process, at)
            reached = int(at.read_text() or -1)
            if process.returncode == 0:
                counts = json.loads(said.read_text())
                outcome.read += counts["read"]
                outcome.refused += counts["refused"]
                break
            if reached < 0:
                raise RuntimeError(f"the process did not start: {errors.read_text()[-2000:]}")
            name, which, edits = chosen(targets, seed, reached)
            code = process.returncode
            ended = "hung" if stuck else f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            fault = f"{ended}: {errors.read_text(errors='replace')[-3000:]}"
            outcome.faults.append({"number": reached, "target": name, "seed": which, "edits": edits, "fault": fault})
            outcome.read += reached - first  # or refused: the process took its counts with it
            first = reached + 1
        if log.exists():
            outcome.faults += [json.loads(line) for line in log.read_text().splitlines()]
    return outcome


def _watch(process: subprocess.Popen[bytes], at: Path) -> bool:
    """Wait for the end; True where it stood still and was killed."""
    seen, since, limit = b"", time.monotonic(), START
    while process.poll() is None:
        time.sleep(0.05)
        now = at.read_bytes()
        if now != seen:
            seen, since, limit = now, time.monotonic(), STUCK
        elif time.monotonic() - since > limit:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000, help="mutations, over all targets")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="one or several; all by default")
    parser.add_argument("--faults", type=Path, help="file to write what went wrong to, as lines of JSON")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    shares = sum(TARGETS[name].share for name in names)
    failed = False
    print(f"{'target':<14}{'mutations':>10}{'read':>10}{'refused':>10}{'faults':>8}{'seconds':>9}")
    for name in names:
        start = time.monotonic()
        count = arguments.count * TARGETS[name].share // shares
        outcome = fuzz([name], count, arguments.seed, arguments.first)
        took = time.monotonic() - start
        ends = f"{outcome.read:>10}{outcome.refused:>10}{len(outcome.faults):>8}"
        print(f"{name:<14}{count:>10}{ends}{took:>9.0f}", flush=True)
        for fault in outcome.faults[:5]:
            print(f"  number {fault['number']}, seed {fault['seed']}: {fault['fault'].strip()}", file=sys.stderr)
        if arguments.faults is not None and outcome.faults:
            with arguments.faults.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(fault) + "\n" for fault in outcome.faults)
        failed = failed or bool(outcome.faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
