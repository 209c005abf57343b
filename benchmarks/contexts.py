"""What a learned drafter gains in long contexts: tokens a step of the same questions behind more and more text.

    python -m benchmarks.contexts drafters/demo-eagle --prompts prompts.jsonl --length 500 --length 6000

A context of N tokens ends with a prompt of the file; texts of other prompts stand before it. Answers are greedy,
several in one batch, and sizes are fixed, so no figure depends on how fast the machine was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.acceptance import interval
from outpace import Engine, SamplingParams
from outpace.engine.load import load_engines
from outpace.errors import OutpaceError, ParameterError
from outpace.measure.prompts import PromptRow, encode_turns, read_prompts

CONFIGURATIONS = {"chain of 4": "{0},branch=1,size=4", "tree of 16": "{0},size=16"}
LENGTHS = (500, 2000, 6000)
OWN = 350  # tokens that a question may have itself, its template included


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="a trained drafter's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines: questions, and texts before them")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default="eagle")
    parser.add_argument("--length", type=int, action="append", help=f"repeatable; default: {LENGTHS}")
    parser.add_argument("--limit", type=int, default=16, help="questions, spread evenly over the file")
    parser.add_argument("--max-tokens", "-n", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4, help="prompts that run together")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(arguments)
    try:
        return run(given)
    except OutpaceError as error:
        print(f"contexts: {error}", file=sys.stderr)
        return 2


def run(given: argparse.Namespace) -> int:
    """Raises OutpaceError."""
    lengths = sorted(given.length or LENGTHS)
    specs = {name: spec.format(f"{given.method}:{given.drafter}") for name, spec in CONFIGURATIONS.items()}
    options = {"max_rows": given.rows, "prefix_rows": 0, "threads": given.threads, "backend": "native"}
    engines = dict(zip(specs, load_engines(Engine, given.model, list(specs.values()), options), strict=True))
    params = SamplingParams(max_tokens=given.max_tokens)
    base: dict[str, float] = {}
    try:
        one = next(iter(engines.values()))
        rows = read_prompts(given.prompts)
        short = [row for row in rows if len(encode_turns(one, row)) <= min(OWN, lengths[0] * 3 // 4)]
        if not short:
            raise ParameterError(f"{given.prompts} has no prompt of at most {OWN} tokens: give another file")
        asked = [short[i * len(short) // given.limit] for i in range(min(given.limit, len(short)))]
        for length in lengths:
            prompts = [behind_texts(one, row, rows, length) for row in asked]
            mean = np.mean([len(its) for its in prompts])
            for name, engine in engines.items():
                stats = [its.stats for its in engine.generate_many(prompts, params)]
                low, high = interval([(its.tokens, its.steps) for its in stats])
                gained = sum(its.tokens for its in stats) / sum(its.steps for its in stats)
                share = gained / base.setdefault(name, gained)
                print(
                    f"{mean:.0f} tokens, {name}: {gained:.2f} tokens a step ({low:.2f}-{high:.2f}), {share:.2f} of "
                    f"that at {lengths[0]}", flush=True,
                )  # fmt: skip
    finally:
        for engine in engines.values():
            engine.close()
    return 0


def behind_texts(engine: Engine, row: PromptRow, rows: Sequence[PromptRow], length: int) -> list[int]:
    """About ``length`` token ids: the row's question, behind texts of other rows, drawn by its id."""
    assert engine.tokenizer is not None
    order = np.random.default_rng(list(row.id.encode())).permutation(len(rows))
    room = length - len(encode_turns(engine, row))
    before: list[int] = []
    for i in order.tolist():
        if len(before) >= room:
            break
        if rows[i].id != row.id:
            before += engine.tokenizer.encode(rows[i].turns[0] + "\n\n").tolist()
    text = engine.tokenizer.decode(before[len(before) - room :])
    ids: list[int] = encode_turns(engine, PromptRow(row.id, row.category, (f"{text}\n\n{row.turns[0]}",))).tolist()
    return ids


if __name__ == "__main__":
    sys.exit(main())
