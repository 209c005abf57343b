"""Counts the instructions of decoding steps under callgrind and compares them with those that the repository keeps.

``scripts/instructions`` calls it. Instructions do not depend on the machine's load, only on the code, the compiler and
Python: a count holds where both are those that instructions.json names, and is printed without a verdict elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).with_suffix(".json")
ALLOWED = 1.05  # times the kept count
SEED = 7
TEXT = "One two three four five six. One two three four five six. One two three four"
TOKENS = [11, 23, 35, 47, 59] * 12
# name -> (model, drafter, temperature, steps counted): "tiny" shows the engine's own work, "demo" the kernels'. Every
# draft has at most 4 nodes, so that no clock decides how many.
WORKLOADS = {
    "engine, plain": ("tiny", "none", 0.0, 16),
    "engine, plain, sampled": ("tiny", "none", 0.8, 16),
    "engine, suffix": ("tiny", "suffix", 0.0, 16),
    "engine, suffix, sampled": ("tiny", "suffix", 0.8, 16),
    "demo, plain": ("demo", "none", 0.0, 2),
    "demo, suffix+eagle, sampled": ("demo", f"suffix+eagle:{ROOT}/drafters/demo-eagle", 0.8, 2),
}
REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def decode(requests: str) -> None:
    """Under callgrind: decode each workload, and have the counts of its later steps written."""
    sys.path.insert(0, str(ROOT))
    from outpace import Engine, SamplingParams
    from tests.native.native_helpers import Tiny

    library = ctypes.CDLL(requests)
    with Tiny() as tiny:
        models = {"tiny": str(tiny.path("Q8_0", vocab=190, tokenizer=1)), "demo": "demo"}
        for name, (model, drafter, temperature, steps) in WORKLOADS.items():
            options = {"backend": "native", "threads": 1, "size": 4, "max_length": 512}
            engine = Engine.load(models[model], drafter=drafter, **options)
            params = SamplingParams(max_tokens=200, temperature=temperature, seed=SEED, ignore_eos=True)
            engine.add(TEXT if model == "demo" else TOKENS, params, raw=True)
            for _ in range(steps + 2):  # the prompt, and what is done once
                engine.step()
            gc.collect()
            gc.disable()  # when it runs depends on all that was made before
            library.begin()
            for _ in range(steps):
                engine.step()
            library.end(name.encode())
            gc.enable()


def costs(dump: str) -> Iterator[tuple[str, int]]:
    """(object file, instructions) of every line of a callgrind dump that is a function's own."""
    names: dict[str, str] = {}
    current, called = "", False
    for line in dump.splitlines():
        if match := re.match(r"ob=(\(\d+\))(?: (.*))?", line):
            current = names.setdefault(match[1], match[2] or "")
        elif match := re.match(r"cob=(\(\d+\)) (.*)", line):
            names[match[1]] = match[2]
        elif line.startswith("calls="):
            called = True  # what the next line counts is the callee's
        elif re.match(r"[+\-*\d]\S* \d+$", line):
            if not called:
                yield current, int(line.split()[1])
            called = False


def count() -> dict[str, dict[str, int]]:
    """Instructions a step, by workload: the extension's own ("native") and everybody else's ("rest")."""
    with tempfile.TemporaryDirectory() as folder:
        source, requests = Path(folder, "requests.c"), Path(folder, "requests.so")
        source.write_text(REQUESTS)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", requests, source], check=True)
        settings = {"OUTPACE_ISA": "avx2", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        output = f"--callgrind-out-file={folder}/counts"
        callgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", output]
        command = [*callgrind, sys.executable, __file__, "--decode", str(requests)]
        subprocess.run(command, env=os.environ | settings, check=True)
        found = {}
        for path in Path(folder).glob("counts.*"):
            dump = path.read_text()
            if match := re.search(r"^desc: Trigger: Client Request: (.*)$", dump, re.MULTILINE):
                spent = {"native": 0, "rest": 0}
                for file, n in costs(dump):
                    spent["native" if "outpace/_native" in file else "rest"] += n
                found[match[1]] = {whose: n // WORKLOADS[match[1]][3] for whose, n in spent.items()}
        return {name: found[name] for name in WORKLOADS}


def made_with() -> dict[str, str]:
    """What else than the repository decides how many instructions there are, by whose count it changes."""
    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {"native": compiler, "rest": f"Python {sys.version.split()[0]}"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/instructions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--accept", metavar="WHY", help="keep the counts of now, for this reason")
    parser.add_argument("--decode", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode:
        decode(arguments.decode)
        return 0
    now, counts = made_with(), count()
    if arguments.accept:
        KEPT.write_text(json.dumps({"why": arguments.accept, "made_with": now, "counts": counts}, indent=1) + "\n")
    kept = json.loads(KEPT.read_text())
    comparable = [whose for whose in now if now[whose] == kept["made_with"][whose]]
    for whose in set(now) - set(comparable):
        print(f"{whose}: counted with {now[whose]}, kept with {kept['made_with'][whose]}, so there is no verdict on it")
    slower = False
    for name, counted in counts.items():
        for whose, n in counted.items():
            ratio = n / kept["counts"][name][whose]
            bad = whose in comparable and ratio > ALLOWED
            slower |= bad
            print(f"{name:30}{whose:8}{n:14,} a step, {ratio:.3f} of what is kept{'  <- TOO MANY' if bad else ''}")
    if slower:
        print(
            f"more than {ALLOWED - 1:.0%} above what scripts/instructions.json keeps: find out why, or say why in the "
            "same commit with scripts/instructions --accept WHY",
            file=sys.stderr,
        )
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
