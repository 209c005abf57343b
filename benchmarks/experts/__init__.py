"""A mixture of 64 experts, 8 used, that writes the demo's text: forwards by width, and drafted against plain decoding.

    python -m benchmarks experts --prompts spec_bench_dev.jsonl --llama-bench build/bin/llama-bench \
        --llama-server build/bin/llama-server

The file (0.9B parameters, made once in the cache; grow.py says how) computes what the demo model computes, so that
drafts are accepted as real text's are. Widths and experts read are of real text behind a prompt. Plain and drafted
decoding take turns prompt by prompt; beside each category's time stands what its steps cost by count, each at its
width's price above, which no other work on the machine disturbs, and its most frequent reason. llama.cpp runs the same
file: forwards of the same widths (`llama-bench -p`), then its plain and drafting servers, in turn.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experts.grow import grow
from benchmarks.figures import Measuring, add_json, at_least_one, emit
from benchmarks.peers import Configuration as Peer
from benchmarks.peers import Worker
from benchmarks.peers.llamacpp import llama_bench
from outpace.common.files import cache_dir
from outpace.engine.engine import Engine
from outpace.engine.intake import load_engines
from outpace.engine.request import RowRecord, StepRecord
from outpace.errors import ParameterError
from outpace.measure.bench import Bench, Configuration, about_loops, written
from outpace.measure.prompts import PromptRow, encode_turns, read_prompts
from outpace.models import demo
from outpace.models.base import Batch
from outpace.models.load import load
from outpace.models.native.model import NativeModel
from outpace.models.options import LoadOptions
from outpace.params import SamplingParams

WIDTHS = (1, 2, 4, 8, 16)
CONTEXT = 64  # tokens before a forward that is timed
TEXT = Path(__file__).parents[2] / "docs" / "policy.md"  # what routers are laid out on, and widths measured with
FLOOR = 0.98  # of plain decoding, in every category


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with turns, and categories")
    parser.add_argument("--limit", type=at_least_one, default=3, help="prompts a category (3)")
    parser.add_argument("--max-tokens", "-n", type=at_least_one, default=96)
    parser.add_argument("--drafter", "-d", default="suffix")
    parser.add_argument("--rounds", type=at_least_one, default=12, help="of forwards by width (12)")
    parser.add_argument("--threads", type=at_least_one, default=2)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--spec-type", default="ngram-simple", help="of llama-server (ngram-simple)")
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    rows = chosen(read_prompts(given.prompts), given.limit)
    path = made()
    found: dict[str, Any] = {"model": path.name}
    with Measuring() as measuring:
        found["widths"] = widths(path, given.rounds, given.threads)
        emit(given, found, partial=True)
        found |= decode(path, rows, given, {each["width"]: each["plain_steps"] for each in found["widths"]})
        emit(given, found, partial=True)
        if given.llama_bench is not None:
            found["checks"] = {"llama.cpp": llama_bench(str(given.llama_bench), path, given.threads)}
            found["checks"]["Outpace"] = [{"width": each["width"], "ms": each["ms"]} for each in found["widths"]]
            emit(given, found, partial=True)
        if given.llama_server is not None:
            found["llama_server"] = llama_server(given, path, rows)
    emit(given, found)
    return measuring.end(int(found.get("least", 1.0) < FLOOR))


def chosen(rows: Sequence[PromptRow], limit: int) -> list[PromptRow]:
    """So many of each category, which take turns."""
    if not rows:
        raise ParameterError("the file has no prompts")
    groups = {row.category: [other for other in rows if other.category == row.category][:limit] for row in rows}
    return [group[i] for i in range(limit) for group in groups.values() if i < len(group)]


def made() -> Path:
    """The mixture's file, made if it is not there yet."""
    source, path = demo.smollm2(), cache_dir() / "demo-mixture-64-8.gguf"
    if path.exists():
        return path
    print(f"making {path} ...", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(str(source), LoadOptions(threads=1))
    try:
        tokens = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:512], np.int32)
        row, layers = model.kv.alloc(), tuple(range(model.info.layers))
        batch = replace(Batch.pack([row], [tokens], [0], [True]), hidden_layers=layers)
        states = np.array(model.forward(batch).hidden_states(np.arange(len(tokens), dtype=np.int32)).native)
    finally:
        model.close()

    def inputs(layer: int) -> Any:
        """A layer's output stands for the residual stream before its feed-forward."""
        values = states[:, layer]
        return values / np.sqrt((values**2).mean(1, keepdims=True) + 1e-5)

    grow(source, path, inputs)
    return path


def widths(path: Path, rounds: int, threads: int) -> list[dict[str, float]]:
    """Milliseconds and experts read by width; rounds visit all widths."""
    model, tokenizer = load(str(path), LoadOptions(threads=threads))
    assert isinstance(model, NativeModel)
    tokens = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8")), np.int32)
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    read: dict[int, list[float]] = {width: [] for width in WIDTHS}
    row = model.kv.alloc()
    for number in range(rounds + 1):  # the first one warms up
        at = 101 * number
        model.forward(Batch.pack([row], [tokens[at : at + CONTEXT]], [0], [False]))
        for width in WIDTHS:
            batch = Batch.pack([row], [tokens[at + CONTEXT : at + CONTEXT + width]], [CONTEXT], [True])
            begun = time.perf_counter()
            output = model.forward(batch)
            spent = time.perf_counter() - begun
            model.kv.truncate(row, CONTEXT)
            if number:
                times[width].append(1e3 * spent)
                read[width].append(output.experts)
        model.kv.truncate(row, 0)
    count, used = model.info.experts, model.info.used_experts
    model.close()
    plain = float(np.median(times[1]))
    found = []
    print("width  ms     plain steps  experts read  if chosen independently")
    for width in WIDTHS:
        ms, experts = float(np.median(times[width])), float(np.mean(read[width]))
        alone = count * (1 - (1 - used / count) ** width)
        print(f"{width:>5}  {ms:<6.2f} {ms / plain:>10.2f}  {experts:>12.1f}  {alone:>23.1f}")
        found.append({"width": width, "ms": ms, "plain_steps": ms / plain, "experts": experts, "independent": alone})
    return found


def decode(path: Path, rows: list[PromptRow], given: argparse.Namespace, prices: dict[int, float]) -> dict[str, Any]:
    """Drafted over plain decoding by category, in time and by count, and why drafts were made or not."""
    names = ["none", given.drafter]
    engines = load_engines(Engine, str(path), names, {"threads": given.threads, "prefix_rows": 0})
    params = SamplingParams(max_tokens=given.max_tokens, temperature=0.0)
    bench = Bench(
        [Configuration(name, engine) for name, engine in zip(names, engines, strict=True)], params, control=True
    )
    bench.run(rows, 1, lambda n: None)
    reported = bench.report()
    figures = reported[1]
    counted = {category: count(engines[1], rows, category, params, prices) for category in figures["by_category"]}
    for engine in engines:
        engine.close()
    least = min(entry["speedup"]["ratio"] or 1.0 for entry in figures["by_category"].values())
    print(f"\n{given.drafter} over plain decoding: {written(figures['speedup'])}, least category {least:.3f}")
    for category, entry in figures["by_category"].items():
        counts, reason = counted[category]
        print(f"  {category}: {written(entry['speedup'])}, by count {counts:.3f}, {entry['tokens_per_step']:.2f} "
              f"tokens a step, {entry['identical']} of {entry['prompts']} identical\n      {reason}")  # fmt: skip
    control = bench.figures("control")["speedup"]
    print(f"  control (plain again): {written(control)}")
    for line in about_loops(reported):
        print(f"  {line}")
    return {"figures": figures, "control": control, "least": least, "counted": counted}


def count(
    engine: Engine, rows: list[PromptRow], category: str, params: SamplingParams, prices: dict[int, float]
) -> tuple[float, str]:
    """Tokens a plain step's time, of a category's prompts, and the most frequent reason with its last figures."""
    steps: list[RowRecord] = []

    def note(step: StepRecord) -> None:
        steps.extend(step.rows)

    engine.on_step = note
    try:
        for row in rows:
            if row.category == category:
                engine.generate(encode_turns(engine, row).tolist(), params)
    finally:
        engine.on_step = None
    spent = sum(float(np.interp(1 + len(step.kept), list(prices), list(prices.values()))) for step in steps)
    reasons = [step.why for step in steps if step.why]
    heads = Counter(reason.split(":")[0] for reason in reasons)
    if not heads:
        return sum(step.gained for step in steps) / spent, "no step was decided"
    head, often = heads.most_common(1)[0]
    last = [reason for reason in reasons if reason.startswith(head)][-1]
    return sum(step.gained for step in steps) / spent, f"{often} of {len(steps)} steps, as: {last}"


def llama_server(given: argparse.Namespace, path: Path, rows: list[PromptRow]) -> dict[str, Any]:
    """Tokens a second of llama.cpp, plain and drafted in turn, by category."""
    modes = ["plain", given.spec_type]
    spent: dict[str, dict[str, list[float]]] = {row.category: {mode: [0.0, 0.0] for mode in modes} for row in rows}
    with Engine.load(str(path), drafter="none", threads=given.threads) as engine:
        eos = engine.model.info.eos_ids[0]
        prompts = [encode_turns(engine, row).tolist() for row in rows]
    workers: list[Worker] = []
    try:
        for mode in modes:
            peer = Peer("llamacpp-q4_1-built", mode, "", given.llama_server)
            first = {"tokens": prompts[0][:64], "max_tokens": 8, "eos": eos}
            workers.append(Worker(peer, path, cache_dir() / "experts.log", first))
        for row, prompt in zip(rows, prompts, strict=True):
            for worker in workers:
                answer = worker.ask({"tokens": prompt, "max_tokens": given.max_tokens, "eos": eos})
                total = spent[row.category][worker.configuration.mode]
                total[0] += max(answer["tokens"] - 1, 0)
                total[1] += answer["rest"]
    finally:
        for worker in workers:
            worker.close()
    print(f"\nllama.cpp, {given.spec_type} over plain:")
    found = {}
    for category, by_mode in spent.items():
        speeds = {mode: tokens / seconds if seconds else 0.0 for mode, (tokens, seconds) in by_mode.items()}
        ratio = speeds[given.spec_type] / speeds["plain"] if speeds["plain"] else 0.0
        print(f"  {category}: {speeds['plain']:.1f} tokens/s plain, {ratio:.3f} drafted")
        found[category] = {**speeds, "ratio": ratio}
    return found
