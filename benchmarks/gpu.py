"""First figures on a GPU: plain decoding, ngram and suffix in float32 and bfloat16, and how many answers agree.

    python -m benchmarks gpu --json results/gpu.json                       # the demo model: no network is needed
    python -m benchmarks gpu --model PATH --prompts FILE --limit 20 --batch 1 --batch 8
    python -m benchmarks gpu --device cpu --limit 2 --max-tokens 16        # the script itself, where there is no card

Every prompt runs under every drafter in turn (A B A B), greedy and at temperature 0.8. "identical" and "near-ties"
count answers against plain decoding of the same dtype; float32 promises no others. Exit code 1 where float32 breaks
that; 2 for bad input.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.figures import Measuring, add_json, emit
from outpace.engine.engine import Engine
from outpace.engine.load import load_engines
from outpace.measure.bench import Bench, Configuration
from outpace.measure.prompts import PromptRow, read_prompts
from outpace.params import SamplingParams

DRAFTERS = ("none", "ngram", "suffix")
DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.0, 0.8)
BATCHES = (1, 8)
PROMPTS = (
    ("copy", "Repeat this list three times: apples, pears, plums, cherries, quinces, medlars, figs, dates."),
    ("copy", "Correct the spelling and give the text back: The quik brown fox jumpd over the lazy dog near the rivr."),
    ("code", "Write a Python class for a stack with push, pop, peek and size, each with a docstring."),
    ("code", "Write a C function that sums an array of ints, and one that sums an array of doubles."),
    ("list", "List the days of the week, then the months of the year, each with its number."),
    ("list", "Count from one to forty in words."),
    ("chat", "Why is the sky blue, and why is the sunset red?"),
    ("chat", "Give me a plan for a rainy afternoon with two small children."),
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--drafter", "-d", action="append", help=f"beside none; default: {' '.join(DRAFTERS[1:])}")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--temperature", "-t", action="append", type=float, help=f"default: {TEMPERATURES}")
    parser.add_argument("--batch", action="append", type=int, help=f"default: {BATCHES}")
    parser.add_argument("--size", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: eight of its own")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    own = [PromptRow(str(i), kind, (text,)) for i, (kind, text) in enumerate(PROMPTS)]
    prompts = own[: given.limit] if given.prompts is None else read_prompts(given.prompts, given.limit)
    drafters = ["none", *(given.drafter or DRAFTERS[1:])]
    rows: list[dict[str, Any]] = []
    print(
        f"{'dtype':<9} {'T':>4} {'batch':>5} {'drafter':<16} {'tokens/s':>9} {'per step':>8} {'of plain':>8} "
        f"{'same':>5} {'ties':>5}"
    )
    with Measuring() as measuring:
        for dtype in given.dtype or DTYPES:
            options = {"backend": "transformers", "device": given.device, "dtype": dtype, "size": given.size}
            engines = load_engines(Engine, given.model, drafters, options)
            for temperature in given.temperature or TEMPERATURES:
                for batch in given.batch or BATCHES:
                    params = SamplingParams(temperature=temperature, max_tokens=given.max_tokens, seed=1)
                    bench = Bench([Configuration(n, e) for n, e in zip(drafters, engines, strict=True)], params)
                    with Measuring() as running:
                        bench.run(prompts, batch, lambda n: None)
                    report = bench.report() if bench.runs else []
                    for entry in report:
                        speed, plain = (row["end_to_end_tokens_per_second"] for row in (entry, report[0]))
                        rows.append({"dtype": dtype, "temperature": temperature, "batch": batch, **entry})
                        print(
                            f"{dtype:<9} {temperature:>4} {batch:>5} {entry['name']:<16} {speed:>9.1f} "
                            f"{entry['tokens_per_step']:>8.2f} {speed / plain:>8.2f} "
                            f"{entry['identical']:>2}/{entry['prompts']:<2} {entry['near_ties']:>5}",
                            flush=True,
                        )
                    running.end(0)
            engines[0].close()  # the target, which they share
    device = _device_name(given.device)
    settings = {"model": given.model, "device": device, "max_tokens": given.max_tokens, "size": given.size}
    emit(given, {"settings": settings, "rows": rows})
    broken = [row for row in rows if row["dtype"] == "float32" and row["identical"] + row["near_ties"] < row["prompts"]]
    return measuring.end(1 if broken else 0)


def _device_name(device: str) -> str:
    import torch

    versions = f"torch {torch.__version__}"
    return f"{torch.cuda.get_device_name(device)}, {versions}" if device.startswith("cuda") else f"{device}, {versions}"
