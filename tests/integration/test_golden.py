"""Golden answers of the demo model: the same on every processor and path, plain or drafted, from now on.

``golden.json`` holds answers (token ids) and hashes of logits. It may be made anew only where ``kArithmetic`` of
native/kernels/table.h is raised, in the same commit, which says what was worth changing every answer; or where answers
are added, none altered. The command: ``python -m tests.integration.test_golden``.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace._fast import native
from outpace.models.base import Batch
from outpace.models.load import load
from outpace.models.native.model import load_native
from outpace.models.options import LoadOptions
from tests.native.native_helpers import write

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
# Kinds of layers, by an architecture that has them: recurrent ones, mixtures, sinks, latents, caps, other heads.
KINDS = ("qwen35", "lfm2", "granitehybrid", "falcon-h1", "qwen2moe", "gpt-oss", "deepseek2", "gemma2", "gemma4")
KV_TYPES = ("bfloat16", "float16", "int8", "int4", "float32")


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


def kind_hash(kind: str, folder: Path, **options: Any) -> str:
    """Of 70 tokens' logits of a random model of this kind: a chunk, a step, a tree, a step behind one of its paths."""
    path = folder / f"{kind}.gguf"
    write(path, "Q8_0", kind, {})
    model = load_native(path, **options)
    row, digest = model.kv.alloc(), hashlib.sha256()
    tokens = (np.arange(70, dtype=np.int32) * 7919 % 100).astype(np.int32)
    tree = [np.array([-1, 0, 0, 1, 2], np.int32)]
    for start, end, parents in ((0, 64, None), (64, 65, None), (65, 70, tree), (68, 70, None)):
        batch = Batch.pack([row], [tokens[start:end]], [start], [True], parents)
        found = model.forward(batch).logits(np.arange(end - start, dtype=np.int32))
        digest.update(np.ascontiguousarray(found, "<f4").tobytes())
        if parents is not None:
            model.kv.compact(row, 65, np.array([0, 2, 4], np.int32))
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


@pytest.mark.parametrize("path", native.usable_isas())
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers(kind: str, path: str, tmp_path: Path) -> None:
    assert kind_hash(kind, tmp_path, isa=path, threads=2) == golden()["kinds"][kind]


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
    with tempfile.TemporaryDirectory() as folder:
        kinds = {kind: kind_hash(kind, Path(folder)) for kind in KINDS}
    written = {
        "arithmetic": native.ARITHMETIC,
        "logits": {kv_dtype: logits_hash(kv_dtype) for kv_dtype in KV_TYPES},
        "kinds": kinds,
        "answers": found,
    }
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in list(written.items())[:3])
    each = ",\n".join(f"    {json.dumps(tokens)}" for tokens in found)
    FILE.write_text(f'{{\n{lines},\n  "answers": [\n{each}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
