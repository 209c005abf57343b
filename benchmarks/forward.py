"""Forward time of the native runtime by width, context and rows, beside the memory bandwidth of the same minutes.

    python benchmarks/forward.py --model demo --json results/forward.json

Every cell is the median of interleaved rounds (each round visits all cells, so that a slow minute hits all alike); the
bandwidth is measured before, between and after. Ratios within a run hold better than absolute figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from outpace import _native
from outpace.models.base import Batch
from outpace.models.load import LoadOptions, load
from outpace.models.native.model import NativeModel

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class Cell:
    """One combination: forwards of ``rows`` rows, ``width`` tokens each, after ``context`` tokens."""

    def __init__(self, model: NativeModel, rows: list[int], context: int, width: int, rng: np.random.Generator) -> None:
        self.model, self.rows, self.context, self.width = model, rows, context, width
        tokens = [rng.integers(0, model.info.vocab_size, width).astype(np.int32) for _ in rows]
        self.batch = Batch.pack(rows, tokens, [context] * len(rows), [True] * len(rows))
        self.seconds: list[float] = []
        self.phases: dict[str, float] = {}

    def run(self, repeats: int) -> None:
        for _ in range(repeats):
            start = time.perf_counter()
            self.model.forward(self.batch)
            self.seconds.append(time.perf_counter() - start)
            for row in self.rows:
                self.model.kv.truncate(row, self.context)

    def profile(self, repeats: int) -> None:
        self.model.time_phases(True)
        self.model.take_timings()
        kept = self.seconds
        self.seconds = []
        self.run(repeats)
        self.seconds = kept
        self.phases = {name: t / repeats for name, t in self.model.take_timings().items()}
        self.model.time_phases(False)

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    def record(self) -> dict[str, Any]:
        low, high = np.percentile(self.seconds, [10, 90])
        return {
            "rows": len(self.rows), "context": self.context, "width": self.width, "milliseconds": self.median * 1e3,
            "p10": low * 1e3, "p90": high * 1e3, "phases_ms": {k: v * 1e3 for k, v in self.phases.items()},
        }  # fmt: skip


def fill(model: NativeModel, context: int, count: int, rng: np.random.Generator) -> list[int]:
    rows = []
    for _ in range(count):
        row = model.kv.alloc()
        tokens = rng.integers(0, model.info.vocab_size, context).astype(np.int32)
        model.forward(Batch.pack([row], [tokens], [0], [False]))
        rows.append(row)
    return rows


def bandwidth(threads: int) -> float:
    """Bytes a second that the threads read from memory, by plain streaming reads."""
    size = 256 << 20
    return size / _native.read_seconds(size, threads, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 400, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=6, help="forwards of a cell in a round")
    parser.add_argument("--prefill", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, _ = load(options.model, LoadOptions(backend="native", threads=options.threads))
    assert isinstance(model, NativeModel)
    rng = np.random.default_rng(0)
    cells: list[Cell] = []
    for context in options.contexts:
        if context + max(WIDTHS) > model.info.max_length:
            continue
        single = fill(model, context, 1, rng)
        cells += [Cell(model, single, context, width, rng) for width in WIDTHS]
    for count in options.rows:
        if count > 1:
            several = fill(model, 400, count, rng)
            cells += [Cell(model, several, 400, width, rng) for width in (1, 4, 8)]
    prompt = rng.integers(0, model.info.vocab_size, options.prefill).astype(np.int32)
    prefill_row = model.kv.alloc()
    prefill = Batch.pack([prefill_row], [prompt], [0], [False])
    prefill_seconds, speeds = [], [bandwidth(model.threads)]
    for _ in range(options.rounds):
        for cell in cells:
            cell.run(options.repeats)
        start = time.perf_counter()
        model.forward(prefill)
        prefill_seconds.append(time.perf_counter() - start)
        model.kv.truncate(prefill_row, 0)
        speeds.append(bandwidth(model.threads))
    for cell in cells:
        cell.profile(10)
    report(model, cells, speeds, prefill_seconds, options)


def report(model: NativeModel, cells: list[Cell], speeds: list[float], prefill: list[float], options: Any) -> None:
    read = float(np.median(speeds))
    single = [cell for cell in cells if len(cell.rows) == 1]
    contexts = sorted({cell.context for cell in single})
    by = {(cell.context, cell.width): cell for cell in single}
    base = min(contexts, key=lambda c: abs(c - 400))
    one = by[base, 1].median
    spread = f"{min(speeds) / 1e9:.0f} to {max(speeds) / 1e9:.0f}"
    print(f"{model.info.name} ({model.info.dtype}), {model.isa}, {model.threads} threads, {platform.machine()}")
    print(f"weights {model.info.weight_bytes / 1e6:.1f} MB, read bandwidth {read / 1e9:.1f} GB/s ({spread})\n")
    print("| milliseconds | " + " | ".join(f"width {w}" for w in WIDTHS) + " |")
    print("| --- |" + " --- |" * len(WIDTHS))
    for context in contexts:
        print(f"| context {context} | " + " | ".join(f"{by[context, w].median * 1e3:.2f}" for w in WIDTHS) + " |")
    for cell in cells:
        if len(cell.rows) > 1:
            print(f"| {len(cell.rows)} rows x width {cell.width}, context {cell.context} | {cell.median * 1e3:.2f} |")
    fraction = model.info.weight_bytes / one / read
    print(f"\nwidth 1 at {base}: {fraction:.2f} of the bandwidth on weight bytes")
    for width in (8, 16):
        print(f"width {width} / width 1: {by[base, width].median / one:.2f}")
    print(f"prefill of {options.prefill}: {options.prefill / np.median(prefill):.0f} tokens/s\n")
    names = list(by[base, 1].phases)
    print(f"| by phase at {base}, ms | " + " | ".join(names) + " |")
    print("| --- |" + " --- |" * len(names))
    for width in (1, 8, 16):
        phases = by[base, width].phases
        print(f"| width {width} | " + " | ".join(f"{phases[n] * 1e3:.2f}" for n in names) + " |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "model": model.info.name, "dtype": model.info.dtype, "isa": model.isa, "threads": model.threads,
            "weight_bytes": model.info.weight_bytes, "bandwidth": speeds, "fraction_of_bandwidth": fraction,
            "prefill_tokens": options.prefill, "prefill_seconds": prefill, "cells": [cell.record() for cell in cells],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
