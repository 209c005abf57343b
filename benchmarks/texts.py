"""Greedy texts of the native backend against transformers in float32 on the same (dequantised) weights.

    python benchmarks/texts.py --prompts ../shared/data/spec_bench_dev.jsonl --limit 20 --json results/texts.json

The two round differently, so texts part at some point; what matters is how near the tie was there. The native text is
read by the reference in one forward; where its own greedy choice first differs, its text would part. For each prompt:
that output index, the reference's choice, by how many logits it leads the native token, and by how many the native
backend prefers its own. The JSON has the texts, to be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from outpace.arrays import F32, I32
from outpace.engine.engine import Engine
from outpace.exact.noise import Noise
from outpace.files import write_json
from outpace.measure.compare import scores_after
from outpace.measure.prompts import encode_turns, read_prompts
from outpace.models.base import Batch, Model
from outpace.params import SamplingParams


def logits_along(model: Model, prompt: I32, output: I32) -> F32:
    """The logits [len(output), V] from which each token of ``output`` would be chosen."""
    row = model.kv.alloc()
    try:
        tokens = np.concatenate([prompt, output[:-1]]).astype(np.int32)
        wanted = np.arange(len(prompt) - 1, len(tokens), dtype=np.int32)
        return model.forward(Batch.pack([row], [tokens], [0], [True])).logits(wanted)
    finally:
        model.kv.free(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of an answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    rows = read_prompts(options.prompts, options.limit)
    records: list[dict[str, Any]] = []
    with (
        Engine.load(options.model, drafter="none", backend="native", threads=options.threads) as native,
        Engine.load(options.model, drafter="none", backend="transformers", threads=options.threads) as reference,
    ):
        for row in rows:
            prompt = encode_turns(native, row)
            result = native.generate(prompt.tolist(), params)
            output = np.asarray(result.token_ids, np.int32)
            logits = logits_along(reference.model, prompt, output)
            choices = logits.argmax(-1)
            differ = np.flatnonzero(choices != output)
            record: dict[str, Any] = {
                "id": row.id,
                "category": row.category,
                "text": result.text,
                "tokens": len(output),
            }
            line = f"{row.category:>22} {row.id:>5} {len(output):4} tokens"
            if len(differ):
                at = int(differ[0])
                ours, theirs = int(output[at]), int(choices[at])
                scores = scores_after(native, prompt, output[:at].tolist(), params, Noise(0, 0))
                leads = float(scores[ours] - scores[theirs]), float(logits[at, theirs] - logits[at, ours])
                record |= {"at": at, "native_lead": leads[0], "reference_lead": leads[1]}
                record |= {"agree": float((choices == output).mean())}
                words = [reference.tokenizer.decode([token]) for token in (ours, theirs)] if reference.tokenizer else []
                line += f", part at {at:3} {words}: leads of {leads[0]:.3f} (native) and {leads[1]:.3f} (reference)"
            records.append(record)
            print(line, flush=True)
    parted = [record for record in records if "at" in record]
    print(f"\n{len(records) - len(parted)} of {len(records)} texts are the same", end="")
    if parted:
        leads_of = [record["reference_lead"] for record in parted]
        print(f"; the others part at token {np.median([record['at'] for record in parted]):.0f} (median)", end="")
        print(
            f", where the reference's choice leads by {np.median(leads_of):.3f} (median; at most {max(leads_of):.3f})",
            end="",
        )
    print()
    if options.json:
        write_json(options.json, {"model": options.model, "texts": records})


if __name__ == "__main__":
    main()
