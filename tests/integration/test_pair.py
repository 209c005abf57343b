"""The textbook pair that comes with Outpace: a draft model that transformers reads, too, and what it brings."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from outpace import Engine, SamplingParams
from outpace.models.base import Batch
from outpace.models.demo import draft
from outpace.models.load import load
from outpace.models.options import LoadOptions

PROMPTS = ("Name three rivers of Europe.", "Write a Python function that adds two numbers.", "What is a noun?")


def test_transformers_computes_the_same_of_the_file() -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(draft().parent, gguf_file=draft().name).eval()
    assert 10e6 < sum(p.numel() for p in reference.parameters()) < 30e6
    assert draft().stat().st_size < 16e6
    served, _ = load("demo-draft", LoadOptions(backend="native", threads=1))
    try:
        tokens = np.arange(500, 520, dtype=np.int32)
        batch = Batch.pack([served.kv.alloc()], [tokens], [0], [True])
        logits = served.forward(batch).logits(np.arange(len(tokens), dtype=np.int32))
    finally:
        served.close()
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    apart = np.sqrt(np.mean((logits - expected) ** 2)) / expected.std()
    assert apart < 0.03  # activations are rounded to 8 bits where the native backend multiplies 4-bit weights


def test_its_tokens_are_accepted_and_change_nothing() -> None:
    found = []
    for drafter in ("none", "model:demo-draft,size=1"):
        with Engine.load("demo", backend="native", drafter=drafter, threads=1) as engine:
            kinds = [SamplingParams(max_tokens=40, temperature=temperature, seed=1) for temperature in (0.0, 1.0)]
            found.append([engine.generate_many(list(PROMPTS), params) for params in kinds])
    for plain, drafted, least in zip(*found, (0.2, 0.1), strict=True):
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        tried, kept = (sum(getattr(result.stats, name) for result in drafted) for name in ("drafted", "accepted"))
        assert tried > 50
        assert kept > least * tried
