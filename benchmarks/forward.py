"""Forward time of the native runtime by width, context and rows, beside the memory bandwidth of the same minutes.

    python -m benchmarks forward --model demo --one-thread --json results/forward.json
    python -m benchmarks forward --model FILE --contexts 512 8192 32256 --rows 1 --kv-dtypes bfloat16 int8
    python -m benchmarks forward --model FILE --contexts 128 --rows 1 --llama-bench llama.cpp=build/bin/llama-bench

Every cell is the median of interleaved rounds (each round visits all cells, so that a slow minute hits all alike);
the bandwidth is measured before, between and after. Ratios within a run hold better than absolute figures. The second
table is this machine's column of docs/native.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Measuring, add_json, at_least_one, emit
from benchmarks.peers.llamacpp import WIDTHS as CHECKED
from benchmarks.peers.llamacpp import llama_bench
from benchmarks.peers.requantise import q4_0
from outpace import _native
from outpace.measure import machine
from outpace.models import demo
from outpace.models.base import Batch
from outpace.models.load import load
from outpace.models.native.model import NativeModel
from outpace.models.options import KV_DTYPES, KVDType, LoadOptions

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CHUNK = 512  # of a prompt


class Cell:
    """One combination: forwards of ``rows`` rows, ``width`` tokens each, after ``context`` tokens."""

    def __init__(
        self, model: NativeModel, rows: list[int], context: int, width: int, rng: np.random.Generator, kv: str = ""
    ) -> None:
        self.model, self.rows, self.context, self.width, self.kv = model, rows, context, width, kv
        tokens = [rng.integers(0, model.info.vocab_size, width).astype(np.int32) for _ in rows]
        self.batch = Batch.pack(rows, tokens, [context] * len(rows), [True] * len(rows), last_only=width == CHUNK)
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
            "rows": len(self.rows), "context": self.context, "kv": self.kv[2:], "width": self.width,
            "milliseconds": self.median * 1e3, "p10": low * 1e3, "p90": high * 1e3,
            "phases_ms": {k: v * 1e3 for k, v in self.phases.items()},
        }  # fmt: skip


def fill(model: NativeModel, context: int, count: int, rng: np.random.Generator) -> list[int]:
    rows = []
    for _ in range(count):
        row = model.kv.alloc()
        tokens = rng.integers(0, model.info.vocab_size, min(context, CHUNK)).astype(np.int32)
        model.forward(Batch.pack([row], [tokens], [0], [False]))
        lengthen(model, row, context)
        rows.append(row)
    return rows


def lengthen(model: NativeModel, row: int, context: int) -> None:
    """By copies of the row's blocks where those are all that it has: time alone is measured, and reading 32,000 tokens
    takes minutes."""
    kv = model.kv
    plain = not kv.layout.window_bytes and not kv.layout.state_bytes
    for at in range(kv.length(row) // kv.block, context // kv.block if plain else 0):
        part = kv.export_block(row, at % (CHUNK // kv.block))
        assert part is not None
        kv.import_block(row, np.frombuffer(part, np.uint8).data, kv.block)
    while (rest := context - kv.length(row)) > 0:
        model.forward(Batch.pack([row], [np.zeros(min(rest, CHUNK), np.int32)], [kv.length(row)], [False]))


def bandwidth(threads: int) -> float:
    """Bytes a second that the threads read from memory, by plain streaming reads."""
    size = 256 << 20
    return size / _native.read_seconds(size, threads, 5)


def named(text: str) -> tuple[str, str]:
    name, _, command = text.partition("=")
    if not name or not command:
        raise argparse.ArgumentTypeError(f"{text!r} has no name or no command: give NAME=COMMAND, as in llama.cpp=PATH")
    return name, command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 400, 1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument(
        "--kv-dtypes",
        nargs="+",
        choices=KV_DTYPES,
        default=KV_DTYPES[:1],
        help="of the cache, in turn; the first in all tables",
    )
    parser.add_argument("--rounds", type=at_least_one, default=8)
    parser.add_argument("--repeats", type=int, default=6, help="forwards of a cell in a round")
    parser.add_argument("--prefill", type=int, default=1000)
    parser.add_argument(
        "--llama-bench", action="append", metavar="NAME=COMMAND", default=[], type=named,
        help="the same widths there, --model as it is and as Q4_0, before and after; the fastest",
    )  # fmt: skip
    add_json(parser)
    parser.add_argument("--one-thread", action="store_true", help="also with one thread, in turn: what threads bring")


def run(options: argparse.Namespace) -> int:
    models = [(loaded(options.model, options.threads, kv_dtype), kv_dtype) for kv_dtype in options.kv_dtypes]
    model = models[0][0]
    rng = np.random.default_rng(0)
    cells: list[Cell] = []
    for context in options.contexts:
        if context + max(WIDTHS) > model.info.max_length:
            continue
        sizes = [*WIDTHS, CHUNK] if context + CHUNK <= model.info.max_length else WIDTHS
        for each, kv_dtype in models:
            single = fill(each, context, 1, rng)
            cells += [Cell(each, single, context, width, rng, f", {kv_dtype} KV") for width in sizes]
    for count in options.rows:
        if count > 1:
            several = fill(model, 400, count, rng)
            cells += [Cell(model, several, 400, width, rng) for width in (1, 4, 8)]
    alone: list[Cell] = []  # at the base context, with one thread
    if options.one_thread:
        lone = loaded(options.model, 1, options.kv_dtypes[0])
        base = nearest(options.contexts)
        row = fill(lone, base, 1, rng)
        alone = [Cell(lone, row, base, width, rng) for width in WIDTHS]
    prompt = rng.integers(0, model.info.vocab_size, options.prefill).astype(np.int32)
    prefill_row = model.kv.alloc()
    prefill = Batch.pack([prefill_row], [prompt], [0], [False])
    prefill_seconds, speeds = [], [bandwidth(model.threads)]
    others = dict(options.llama_bench)
    source = demo.smollm2() if options.model == "demo" else Path(options.model)
    checks: dict[str, list[Any]] = {}
    with Measuring() as measuring:
        before = checked(others, source, model.threads)
        for _ in range(options.rounds):
            for cell in [*cells, *alone]:
                cell.run(1 if cell.width == CHUNK else options.repeats)
            start = time.perf_counter()
            model.forward(prefill)
            prefill_seconds.append(time.perf_counter() - start)
            model.kv.truncate(prefill_row, 0)
            speeds.append(bandwidth(model.threads))
        for cell in cells:
            if cell.model is model and cell.width != CHUNK:
                cell.profile(10)
        checks = {name: fewest(before[name], found) for name, found in checked(others, source, model.threads).items()}
    if prefill_seconds:  # a whole round, at least
        report(model, cells, alone, speeds, prefill_seconds, checks, options)
    return measuring.end(0)


def checked(others: dict[str, str], source: Path, threads: int) -> dict[str, list[Any]]:
    """Milliseconds by width of others' ``llama-bench``, on the file and on its Q4_0, their fastest: the faster one."""
    if not others:
        return {}
    paths = [source, q4_0(source)]
    return {name: fewest(*(llama_bench(command, path, threads) for path in paths)) for name, command in others.items()}


def fewest(*found: list[Any]) -> list[Any]:
    return [min(entries, key=lambda entry: float(entry["ms"])) for entries in zip(*found, strict=True)]


def loaded(name: str, threads: int | None, kv_dtype: KVDType) -> NativeModel:
    model, _ = load(name, LoadOptions(backend="native", threads=threads, kv_dtype=kv_dtype))
    assert isinstance(model, NativeModel)
    return model


def nearest(contexts: list[int]) -> int:
    """The context that ratios of widths are taken at."""
    return min(contexts, key=lambda context: abs(context - 400))


def report(
    model: NativeModel,
    cells: list[Cell],
    alone: list[Cell],
    speeds: list[float],
    prefill: list[float],
    checks: dict[str, list[Any]],
    options: Any,
) -> None:
    cpu = machine.cpu()
    read = float(np.median(speeds))
    single = [cell for cell in cells if len(cell.rows) == 1 and cell.model is model]
    contexts = sorted({cell.context for cell in single})
    by = {(cell.context, cell.width): cell for cell in single}
    base = nearest(contexts)
    one = by[base, 1].median
    spread = f"{min(speeds) / 1e9:.0f} to {max(speeds) / 1e9:.0f}"
    print(f"{model.info.name} ({model.info.dtype}), {model.isa}, {model.threads} threads, {cpu['model']}")
    print(f"weights {model.info.weight_bytes / 1e6:.1f} MB, read bandwidth {read / 1e9:.1f} GB/s ({spread})\n")
    print("| milliseconds | " + " | ".join(f"width {w}" for w in WIDTHS) + f" | {CHUNK} of a prompt |")
    print("| --- |" + " --- |" * (len(WIDTHS) + 1))
    rows: dict[str, list[str]] = {}
    for cell in cells:
        if len(cell.rows) == 1:
            row = rows.setdefault(f"context {cell.context}{cell.kv}", [])
            row.append(f"{cell.median * 1e3:.2f}")
    print("\n".join(f"| {name} | {' | '.join(row)} |" for name, row in rows.items()))
    for cell in cells:
        if len(cell.rows) > 1:
            print(f"| {len(cell.rows)} rows x width {cell.width}, context {cell.context} | {cell.median * 1e3:.2f} |")
    fraction = model.info.weight_bytes / one / read
    ratios = {f"weight bytes / time of width 1, over the read bandwidth (context {base})": fraction}
    ratios |= {f"width {width} / width 1": by[base, width].median / one for width in (8, 16)}
    for cell in cells:
        if len(cell.rows) > 1 and cell.width == 1:
            ratios[f"{len(cell.rows)} rows of width 1 / 1 row, context {cell.context}"] = cell.median / one
    if contexts[-1] > contexts[0]:
        ends = by[contexts[-1], 1].median, by[contexts[0], 1].median
        ratios[f"context {contexts[-1]} / {contexts[0]} at width 1"] = ends[0] / ends[1]
    for cell in alone:
        ratios[f"{model.threads} threads over one, width {cell.width}"] = cell.median / by[base, cell.width].median
    print(f"\n| {model.info.name} | {cpu['model']}, {model.threads} threads, `{model.isa}` |\n| --- | --- |")
    print(f"| read bandwidth, GB/s | {read / 1e9:.1f} ({spread}) |")
    print(f"| width 1, ms | {one * 1e3:.2f} |")
    print(f"| prefill of {options.prefill}, tokens/s | {options.prefill / np.median(prefill):.0f} |")
    print("\n".join(f"| {name} | {ratio:.2f} |" for name, ratio in ratios.items()) + "\n")
    if checks:
        checks["Outpace"] = [{"width": width, "ms": by[base, width].median * 1e3} for width in CHECKED]
        for name, entries in checks.items():
            print(f"{name}: " + ", ".join(f"{entry['width']} tokens {entry['ms']:.2f} ms" for entry in entries))
        print()
    names = list(by[base, 1].phases)
    print(f"| by phase at {base}, ms | " + " | ".join(names) + " |")
    print("| --- |" + " --- |" * len(names))
    for width in (1, 8, 16):
        phases = by[base, width].phases
        print(f"| width {width} | " + " | ".join(f"{phases[n] * 1e3:.2f}" for n in names) + " |")
    emit(
        options,
        {
            "model": model.info.name, "dtype": model.info.dtype, "isa": model.isa, "threads": model.threads,
            "machine": cpu, "weight_bytes": model.info.weight_bytes, "bandwidth": speeds, "ratios": ratios,
            "prefill_tokens": options.prefill, "prefill_seconds": prefill, "cells": [cell.record() for cell in cells],
            "one_thread": [cell.record() for cell in alone], **({"checks": checks} if checks else {}),
        },
    )  # fmt: skip
