"""Layers with windows give back what no window reaches: the same answers, in the memory that their windows need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from native_helpers import Tiny, feed

from outpace import Engine, SamplingParams
from outpace.errors import MemoryLimitError
from outpace.models.load import estimate
from outpace.models.native.model import NativeModel, load_native
from outpace.models.options import LoadOptions
from tests.driving import finished
from tests.exact.test_tree_drafters import make

WINDOW, LAYERS, FULL = 32, 6, 1
FEW = tuple(range(8))  # tokens of answers, so that guesses hit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of five windowed layers to one full."""
    path = tmp_path_factory.mktemp("windows")
    torch.manual_seed(1)
    config = transformers.Gemma3TextConfig(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, sliding_window=WINDOW,
        query_pre_attn_scalar=16, pad_token_id=None, bos_token_id=None, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(path)
    return path


def load(folder: Path, **options: Any) -> NativeModel:
    return load_native(folder, **{"threads": 1, "dtype": "float32", "kv_dtype": "float32", **options})


def test_far_past_the_window_tokens_are_transformers(folder: Path, rng: np.random.Generator) -> None:
    theirs = transformers.Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = rng.integers(0, 120, 900)
    with torch.inference_mode():
        expected = theirs.generate(torch.from_numpy(prompt)[None], max_new_tokens=60, do_sample=False)[0, 900:].tolist()
    model = load(folder)
    with Engine(model, prefill_chunk=100, max_rows=2) as engine:
        engine.add(prompt.tolist(), SamplingParams(max_tokens=60))
        held = []
        while not engine.idle:
            ends = [delta.result for delta in engine.step() if delta.result is not None]
            held.append(model.kv.bytes)
            engine.check()
        most = model.kv.bytes_for(960)
    assert list(ends[0].token_ids) == expected
    position = model.info.kv_bytes_per_position // LAYERS  # of a layer
    windows = (LAYERS - FULL) * position * (WINDOW + 100 + 3 * 64)  # a chunk, and what is cut to blocks
    assert max(held) <= FULL * position * 960 + windows < model.info.kv_bytes_per_position * 960 / 2
    assert held[-1] <= most


def answers(model: NativeModel, prompts: list[list[int]], drafter: str | None = None, **options: Any) -> Any:
    """Tokens by request and sample, of prompts in two rounds, and how many tokens were reused; rows lose their place
    at random where ``options`` bound them."""
    rng, preempts = np.random.default_rng(5), options.pop("preempts", False)
    given = {} if drafter is None else {"drafter": make(drafter, model), "size": 6}
    tokens, reused = [], 0
    with Engine(model, **{"max_rows": 3, "prefill_chunk": 150, **given, **options}) as engine:
        for _ in range(2):
            for i, prompt in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=30 + 50 * (i % 3),
                    n=1 + 2 * (i % 2),
                    temperature=0.8 * (i % 3 > 0),
                    seed=i,
                    allowed_tokens=FEW,
                )
                engine.add(prompt, params)
            found: dict[Any, Any] = {}
            while not engine.idle:
                for delta in engine.step():
                    if delta.result is not None:
                        found[delta.request, delta.sample] = delta.result
                running = engine._core.scheduler.running
                if preempts and running and rng.random() < 0.05:
                    engine._core.scheduler.preempt(running[int(rng.integers(len(running)))])
                engine.check()
            tokens.append([found[key].token_ids for key in sorted(found)])
            reused += sum(result.stats.reused_tokens for result in found.values())
    return tokens, reused


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 120, 400).tolist()  # as a system's prompt
    several = [shared + rng.integers(0, 120, n).tolist() for n in (200, 90, 300)]
    return [*several, rng.integers(0, 120, 700).tolist(), [3, 1, 2] * 60]


def test_shared_beginnings_change_no_token(folder: Path, prompts: list[list[int]]) -> None:
    plain, _ = answers(load(folder), prompts, prefix_rows=0)
    model = load(folder)
    memory = 2 * model.kv.bytes_for(900)
    drafted, reused = answers(model, prompts, "suffix", prefix_rows=4)
    assert drafted == plain
    assert reused > 400 + 3 * 700
    tight = load(folder, kv_memory=memory)
    assert answers(tight, prompts, "ngram", preempts=True, prefix_rows=4)[0] == plain


def test_a_tight_bound_shortens_what_is_read_at_once(folder: Path, rng: np.random.Generator) -> None:
    prompt, model = rng.integers(0, 120, 1500).tolist(), load(folder)
    memory = model.kv.bytes_for(1600) + model.kv.bytes_for(1)
    expected, _ = answers(model, [prompt], prefill_chunk=2000)
    assert answers(load(folder, kv_memory=memory), [prompt], prefill_chunk=2000)[0] == expected
    with Engine(load(folder, kv_memory=memory)) as engine:
        engine.add(prompt, SamplingParams(max_tokens=5))
        finished(engine)
        assert engine.model._handle.kv_held <= memory
        with pytest.raises(MemoryLimitError, match="kv_memory"):
            engine.add(prompt, SamplingParams(max_tokens=2000))


def test_what_a_prompt_leaves_is_found_where_it_ended(folder: Path, rng: np.random.Generator) -> None:
    prompt = rng.integers(0, 120, 500).tolist()
    with Engine(load(folder), prefix_rows=2) as engine:
        engine.add(prompt, SamplingParams(max_tokens=300))  # far past a window
        finished(engine)
        engine.add([*prompt, 5, 6, 7], SamplingParams(max_tokens=5))
        assert [result.stats.reused_tokens for result in finished(engine).values()] == [499]


def test_the_shape_of_gemma_3_4b_at_32k(tiny: Tiny) -> None:
    """29 layers with windows of 1,024 and 5 that see all: within 1.2 times what windows need."""
    sizes = {"layers": 34, "window": 1024, "context": 40000, "heads": 4, "kv_heads": 1}
    model = tiny.load("Q8_0", "gemma3", sizes, threads=1)
    position = model.info.kv_bytes_per_position // 34
    need = position * (5 * 32768 + 29 * 1024)
    assert need <= model.kv.bytes_for(32768) <= 1.2 * need
    row = model.kv.alloc()
    feed(model, row, np.zeros(3000, np.int32), 256)
    assert model._handle.kv_held <= 1.2 * position * (5 * 3008 + 29 * (1024 + 256))


def test_the_estimate_names_both_parts(folder: Path) -> None:
    taken = estimate(str(folder), LoadOptions(backend="native", dtype="float32", kv_dtype="float32"))
    position = load(folder).info.kv_bytes_per_position
    assert (taken.kv_bytes_per_position, taken.windowed, taken.window) == (position, position * 5 // 6, WINDOW)
