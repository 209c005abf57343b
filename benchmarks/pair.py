r"""A distilled student as the 4-bit GGUF file that comes with Outpace, and how often its tokens are accepted.

    python -m benchmarks pair RUN drafters/demo-draft --prompts spec_bench_dev.jsonl --prompts humaneval_dev.jsonl \
        --package

RUN: what ``outpace train distil`` wrote for the model ``demo``. The folder gets ``demo-draft.gguf``, with the demo
model's tokenizer, ``evaluation.json`` and a model card; ``--package`` moves the file to where ``model:demo-draft``
finds it. Acceptance is measured by ``Engine.generate_many``: with one token drafted a step, accepted over drafted is
the acceptance of a token. Answers must be plain decoding's where a drafter may not change them. Those that end in a
loop draft far better than other text: a second share is without them.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from outpace import Engine, SamplingParams
from outpace.common.arrays import F32, repeated_tail
from outpace.common.files import write_bytes, write_json
from outpace.engine.results import Result
from outpace.errors import ModelError
from outpace.measure.prompts import encode_turns, read_prompts
from outpace.models.demo import draft
from outpace.models.fingerprint import fingerprint
from outpace.models.load import resolve
from outpace.models.weights.facts import read_config
from outpace.params import Acceptance
from outpace.training.export_gguf import copy_field, pairs, writing
from outpace.training.target import TargetWeights

NAME = "demo-draft.gguf"
TYPE = gguf.GGMLQuantizationType.Q4_1
Way = tuple[Acceptance, float]  # acceptance, temperature
PLAIN: tuple[Way, ...] = (("coupled", 0.0), ("coupled", 1.0))
WAYS: tuple[Way, ...] = (*PLAIN, ("rejection", 1.0))
LENGTHS = (1, 4)  # tokens drafted a step


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="repeatable: JSON lines")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each file, spread evenly over it (12)")
    parser.add_argument("--max-tokens", "-n", type=int, default=128, help="an answer (128)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--package", action="store_true", help="it is the one that comes with Outpace")


def run(given: argparse.Namespace) -> int:
    """Raises OutpaceError. 1: an answer was changed."""
    given.out.mkdir(parents=True, exist_ok=True)
    to_gguf(given.run, given.out / NAME, resolve("demo").path)
    found = measured(given.out / NAME, given.prompts, given.limit, given.max_tokens, given.threads)
    write_json(given.out / "evaluation.json", found)
    for name in ("curve.json", "curve.png"):
        if (given.run / name).exists():
            write_bytes(given.out / name, (given.run / name).read_bytes())
    write_bytes(given.out / "README.md", _card(given.run, found).encode())
    if given.package:
        shutil.move(given.out / NAME, draft())
    print(json.dumps(found["figures"], indent=1))
    return 0 if all(row["changed"] in (None, 0) for row in found["figures"]) else 1


def to_gguf(student: Path, out: Path, target: Path) -> None:
    """A student's folder as llama.cpp reads it, matrices in Q4_1, with the tokenizer of the GGUF file ``target``.

    transformers wants states of a multiple of the heads: others are padded with zeros, which changes no number. Raises
    ModelError for a student that is no Llama with one matrix as embedding and head.
    """
    config, weights = read_config(student), TargetWeights(resolve(student))
    shape = weights.decoder
    if config["model_type"] not in ("llama", "mistral") or not shape.tied:
        raise ModelError(f"{student} is no Llama with a tied head: distil one with --free, from a target that has both")
    whole = math.lcm(shape.heads, 32)
    width = shape.hidden if shape.hidden % shape.heads == 0 else -(-shape.hidden // whole) * whole
    share = shape.hidden / width  # of a padded state's mean square

    def padded(values: F32, axis: int) -> F32:
        more = [(0, width - shape.hidden if i == axis % values.ndim else 0) for i in range(values.ndim)]
        return np.ascontiguousarray(np.pad(values, more))

    with writing(out, "llama") as writer:
        writer.add_name("SmolLM2-135M-Instruct draft")
        writer.add_license("apache-2.0")
        writer.add_vocab_size(config["vocab_size"])
        writer.add_block_count(shape.layers)
        writer.add_context_length(shape.max_length)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(shape.inner)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_layer_norm_rms_eps(shape.eps * share)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, field in gguf.GGUFReader(target).fields.items():
            if name.startswith("tokenizer."):
                copy_field(writer, name, field)
        parts = weights.parts()
        matrices = {"token_embd": padded(parts.embedding.numpy(), 1)}
        vectors = {"output_norm": parts.final_norm.numpy()}
        for i in range(shape.layers):
            own = {name: values.numpy() for name, values in weights.layer(i).items()}
            vectors |= {f"blk.{i}.{norm}": own[norm] for norm in ("attn_norm", "ffn_norm")}
            own["q"], own["k"] = pairs(own["q"], shape.heads), pairs(own["k"], shape.kv_heads)
            matrices |= {
                f"blk.{i}.{name}": padded(own[short], 0 if short in ("o", "down") else 1)
                for name, short in (
                    ("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v"), ("attn_output", "o"), ("ffn_gate", "gate"),
                    ("ffn_up", "up"), ("ffn_down", "down"),
                )
            }  # fmt: skip
        for name, values in vectors.items():
            writer.add_tensor(f"{name}.weight", padded(values * np.float32(share**0.5), 0))
        for name, values in matrices.items():
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, TYPE), raw_dtype=TYPE)


def measured(
    student: Path, prompts: Sequence[Path], limit: int, max_tokens: int, threads: int | None = None
) -> dict[str, Any]:
    """Acceptance by temperature and length of the draft: what the public API reports."""
    rows = [row for path in prompts for row in read_prompts(path, limit)]
    options: dict[str, Any] = {"max_rows": 8, "prefix_rows": 0, "threads": threads, "backend": "native"}
    plain: dict[float, list[tuple[int, ...]]] = {}
    figures = []
    for length in (0, *LENGTHS):
        for acceptance, temperature in WAYS if length else PLAIN:
            drafter = f"model:{student},size={length}" if length else "none"
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
            with Engine.load("demo", drafter=drafter, acceptance=acceptance, **options) as engine:
                asked = [encode_turns(engine, row).tolist() for row in rows]
                results = engine.generate_many(asked, params)
            answers = [result.token_ids for result in results]
            if not length:
                plain[temperature] = answers
                continue
            loops = [repeated_tail(tokens) > 0 for tokens in plain[temperature]]
            calm = [result for result, loop in zip(results, loops, strict=True) if not loop]
            same = acceptance == "coupled"  # rejection keeps the distribution, not the answer
            changed = sum(a != b for a, b in zip(answers, plain[temperature], strict=True)) if same else None
            figures.append({
                "acceptance": acceptance, "temperature": temperature, "drafted a step": length, "prompts": len(rows),
                **_figures(results), "looping": sum(loops), "without loops": _figures(calm), "changed": changed,
            })  # fmt: skip
    return {"file": fingerprint(student), "bytes": student.stat().st_size, "max_tokens": max_tokens, "figures": figures}


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    steps, drafted, accepted = (
        sum(getattr(result.stats, name) for result in results) for name in ("steps", "drafted", "accepted")
    )
    tokens = sum(len(result.token_ids) for result in results)
    return {
        "steps": steps, "drafted": drafted, "accepted": accepted,
        "share": round(accepted / drafted, 4) if drafted else None,
        "tokens a step": round(tokens / steps, 3) if steps else None,
    }  # fmt: skip


def _card(run: Path, found: Mapping[str, Any]) -> str:
    made = json.loads((run / "training.json").read_text(encoding="utf-8"))
    recipe = {name: value for name, value in made["recipe"].items() if name != "loop"}
    rows = [
        f"| {row['acceptance']} | {row['temperature']:g} | {row['drafted a step']} | {row['share']:.3f} | "
        f"{row['tokens a step']:.2f} | {row['looping']} | {_of(row['without loops'])} | "
        f"{'' if row['changed'] is None else row['changed']} |"
        for row in found["figures"]
    ]
    parts = [
        "# demo-draft: a small model that drafts for SmolLM2-135M-Instruct",
        f"A Llama with the target's tokenizer, distilled from it; {found['bytes'] / 1e6:.1f} MB, matrices in Q4_1. "
        "Apache-2.0, as its target is. It comes with the package, as `model:demo-draft`; "
        "`python -m benchmarks pair` wrote this.",
        f"Target: {made['target']['name']}, fingerprint `{made['target']['fingerprint']}`.",
        f"## Acceptance\n\n{found['figures'][0]['prompts']} prompts that it was not trained on, at most "
        f"{found['max_tokens']} tokens an answer. `share`: accepted of all drafted tokens, so with one token drafted a "
        "step the acceptance of a token. `loops`: answers that end in one, which drafts far better than other text; "
        "`rest`: share and tokens a step of the others. `changed`: answers that are not plain decoding's.",
        "| acceptance | T | drafted a step | share | tokens a step | loops | rest | changed |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows),
        "## Recipe\n\n```json\n" + json.dumps(recipe, indent=1) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _of(figures: Mapping[str, Any]) -> str:
    return "-" if figures["share"] is None else f"{figures['share']:.3f}, {figures['tokens a step']:.2f}"
