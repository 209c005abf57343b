"""Golden answers of the demo model: the same on every processor and path, plain or drafted, from now on.

``golden.json`` holds answers (token ids) and hashes of logits. It may be made anew only where ``kArithmetic`` of
native/kernels/table.h is raised, in the same commit, which says what was worth changing every answer; or where answers
are added, none altered. The command: ``python -m tests.integration.test_golden``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace._fast import native
from outpace.models.base import Batch
from outpace.models.load import load
from outpace.models.options import LoadOptions

FILE = Path(__file__).with_name("golden.json")
PROMPTS = (
    "The capital of France is",
    "Repeat after me, twice: the quick brown fox jumps over the lazy dog.",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
    "Écris une phrase sur le café :",
)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.1, "seed": 2, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
)
DRAFTERS = ("ngram", "suffix", "eagle:demo", "suffix+eagle:demo")
KV_TYPES = ("bfloat16", "int8", "float32")


def paths() -> tuple[str, str]:
    """This machine's own path, and the one that differs most from it: without AVX-512 where there is one."""
    usable = native.usable_isas()
    return usable[0], next((name for name in usable[1:] if name == "avx2"), usable[-1])


def answers(engine: Engine, **drafting: Any) -> list[list[int]]:
    """Of every prompt with every sampling, all at once; ``drafting``: as ``generate_many`` takes it."""
    asked = [(prompt, given) for prompt in PROMPTS for given in SAMPLING]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **given) for _, given in asked]
    results = engine.generate_many([prompt for prompt, _ in asked], params, raw=True, **drafting)
    return [list(result.token_ids) for result in results]


def logits_hash(kv_dtype: str) -> str:
    """Of 70 tokens' logits, in forwards of 64, 1 and 5."""
    model, _ = load("demo", LoadOptions(backend="native", kv_dtype=kv_dtype))
    row, digest = model.kv.alloc(), hashlib.sha256()
    tokens = (np.arange(70, dtype=np.int32) * 7919 % model.info.vocab_size).astype(np.int32)
    for start, end in ((0, 64), (64, 65), (65, 70)):
        batch = Batch.pack([row], [tokens[start:end]], [start], [True])
        found = model.forward(batch).logits(np.arange(end - start, dtype=np.int32))
        digest.update(np.ascontiguousarray(found, "<f4").tobytes())
    model.close()
    return digest.hexdigest()


def golden() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def loaded(drafter: str) -> Engine:
    return Engine.load("demo", drafter=drafter, backend="native", max_length=512)


def test_the_file_belongs_to_this_arithmetic() -> None:
    assert golden()["arithmetic"] == native.ARITHMETIC


@pytest.mark.parametrize("path", paths())
@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_logits(kv_dtype: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_ISA", path)
    assert logits_hash(kv_dtype) == golden()["logits"][kv_dtype]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers(drafter: str) -> None:
    """Plain answers, and drafted ones of any size."""
    with loaded(drafter) as engine:
        assert answers(engine, drafter=False) == golden()["answers"]
        assert answers(engine, size=4) == golden()["answers"]
        assert engine.stats.accepted > 0
        assert answers(engine) == golden()["answers"]


def test_answers_on_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_ISA", paths()[1])
    with loaded(DRAFTERS[-1]) as engine:
        assert answers(engine, size=4) == golden()["answers"]


def main() -> None:
    with loaded("none") as engine:
        found = answers(engine, drafter=False)
    written = {
        "arithmetic": native.ARITHMETIC,
        "logits": {kv_dtype: logits_hash(kv_dtype) for kv_dtype in KV_TYPES},
        "answers": found,
    }
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in list(written.items())[:2])
    each = ",\n".join(f"    {json.dumps(tokens)}" for tokens in found)
    FILE.write_text(f'{{\n{lines},\n  "answers": [\n{each}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
