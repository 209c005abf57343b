"""What history gives to `suffix` on agent-like traffic: the same documents, asked about again in other words.

    python benchmarks/repeats.py record spec_bench_dev.jsonl OUT.jsonl [--limit N] [--threads N]
    python benchmarks/repeats.py run OUT.jsonl [--size N] [--options max=16]

The documents are the long prompts (summarization, rag). Each is asked about three times in other words, in three passes
over all documents, greedily, up to 200 tokens or EOS, by the demo model. ``run`` replays the passes with `suffix`,
without history and with one of every output so far: pass 2 has seen one answer about its document, pass 3 two.
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.replay import VOCAB, replay
from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext
from outpace.drafters.registry import build, parse
from outpace.models.options import LoadOptions

SUMMARY: tuple[str, ...] = (
    "Summarise the text below.",
    "Give a short summary of the following text.",
    "What are the main points of this text?",
)
ANSWER = (
    "Use the text below to answer this question: {}",
    "Read the following text, then answer: {}",
    "{} You find the answer in this text.",
)
LEAST = 1000  # characters of a document


def questions(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the prompt file as three prompts about one document; none if it has no document."""
    text = row["turns"][0]
    if row["category"] == "summarization":
        document, asked = text.removeprefix("Summarize: "), SUMMARY
    elif row["category"] == "rag":
        document, _, question = text.rpartition("\n")
        asked = tuple(words.format(question) for words in ANSWER)
    else:
        return ()
    return tuple(f"{words}\n\n{document}" for words in asked) if len(document) >= LEAST else ()


def record(prompts: str, out: str, limit: int | None, threads: int | None) -> None:
    with open(prompts) as file:
        rows = [row for row in map(json.loads, file) if questions(row)][:limit]
    params = SamplingParams(max_tokens=200)
    with Engine.load("demo", drafter="ngram", threads=threads) as engine, open(out, "w") as sink:
        for row in rows:
            for number, prompt in enumerate(questions(row)):
                ids = engine.encode(prompt)
                output = list(engine.generate(ids.tolist(), params).token_ids)
                kept = {"document": row["id"], "category": row["category"], "question": number}
                sink.write(json.dumps({**kept, "prompt": ids.tolist(), "output": output}) + "\n")
                sink.flush()


def run(path: str, size: int, options: str) -> None:
    with open(path) as file:
        rows = sorted(map(json.loads, file), key=lambda row: row["question"])  # stable: the passes
    target: Any = SimpleNamespace(info=SimpleNamespace(vocab_size=VOCAB))
    before: dict[str, float] = {}
    for name, history in (("without history", 0), ("with history", 1)):
        spec = f"suffix:history={history}" + (f",{options}" if options else "")
        drafter = build(parse(spec), DraftContext(target, None, LoadOptions(), size))
        by: dict[str, np.ndarray[Any, Any]] = {}
        for request, row in enumerate(rows):
            found = np.array(replay(drafter, row, request, size))
            for group in (f"pass {row['question'] + 1}", f"pass {row['question'] + 1} {row['category']}"):
                by[group] = by.get(group, np.zeros(4)) + found
        rates = {group: v[0] / v[1] for group, v in by.items()}
        print(f"{name}, size {size}: " + "  ".join(f"{g} {r:.3f}" for g, r in sorted(rates.items())))
        if history:
            print("gain: " + "  ".join(f"{g} {r / before[g] - 1:+.0%}" for g, r in sorted(rates.items())))
        before = rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("prompts")
    recorder.add_argument("out")
    recorder.add_argument("--limit", type=int)
    recorder.add_argument("--threads", type=int)
    runner = commands.add_parser("run")
    runner.add_argument("path")
    runner.add_argument("--size", type=int, default=7)
    runner.add_argument("--options", default="")
    given = parser.parse_args()
    if given.command == "record":
        record(given.prompts, given.out, given.limit, given.threads)
    else:
        run(given.path, given.size, given.options)


if __name__ == "__main__":
    main()
