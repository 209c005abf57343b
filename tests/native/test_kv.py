"""The KV cache keeps the contract of models/base.py, under random use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from native_helpers import Tiny, feed
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.errors import MemoryLimitError
from outpace.models.base import Batch
from outpace.models.native.model import load_native
from tests.kv_machine import machine

BLOCK = 64


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32", "int8", "int4"])
def test_random_use(kv_dtype: str, tiny: Tiny) -> None:
    model, reference = (tiny.load("Q4_1", threads=1, kv_dtype=kv_dtype) for _ in range(2))
    chosen = settings(max_examples=40, stateful_step_count=25, deadline=None)
    sizes = (1, 2, 5, 30, 63, 64, 65)
    rows = machine(model, reference, sizes, 150, poison=lambda: model._handle.kv_poison())
    run_state_machine_as_test(rows, settings=chosen)


@pytest.mark.parametrize(("architecture", "kv_dtype"), [("gpt-oss", "bfloat16"), ("gemma3", "int8")])
def test_random_use_of_windows(architecture: str, kv_dtype: str, tiny: Tiny) -> None:
    """Every other layer has a window, or all have one."""
    options: Any = {"sizes": {"window": 20}, "threads": 1, "kv_dtype": kv_dtype}
    model, reference = (tiny.load("Q8_0", architecture, **options) for _ in range(2))
    chosen = settings(max_examples=40, stateful_step_count=30, deadline=None)
    sizes = (1, 2, 30, 63, 64, 65, 130)
    rows = machine(model, reference, sizes, 400, poison=lambda: model._handle.kv_poison(), windows=True)
    run_state_machine_as_test(rows, settings=chosen)


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=120, hidden_size=128, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, initializer_range=0.06,
    )  # fmt: skip
    return LlamaForCausalLM(config).half().float().eval()


def logits_of(model: LlamaForCausalLM, tokens: Any) -> Any:
    with torch.inference_mode():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def test_errors_of_cache_types(llama: LlamaForCausalLM, tmp_path: Path, rng: np.random.Generator) -> None:
    """Against transformers in float32: a model in float16 keeps what its weights have."""
    llama.half().save_pretrained(tmp_path)
    tokens = rng.integers(0, 120, 200)
    expected = logits_of(llama.float(), tokens)
    errors = {}
    for kv_dtype in ("auto", "float32", "float16", "bfloat16", "int8"):
        model = load_native(tmp_path, kv_dtype=kv_dtype, threads=1)
        found = feed(model, model.kv.alloc(), tokens, 64)
        errors[kv_dtype] = float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))
        assert model.info.kv_dtype == ("float16" if kv_dtype == "auto" else kv_dtype)
        model.close()
    assert errors["auto"] == errors["float16"] < errors["bfloat16"] / 3


def test_what_float16_cannot_hold_stays_finite(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.v_proj.weight *= 4e4
    llama.save_pretrained(tmp_path)
    model = load_native(tmp_path, kv_dtype="float16", threads=1)
    assert np.isfinite(feed(model, model.kv.alloc(), np.arange(40))).all()


def test_memory_is_bounded_and_given_back(tiny: Tiny) -> None:
    unit = 2 * 2 * 2 * 16 * 2 * BLOCK  # layers, heads, keys and values, dim, bytes, positions
    model = tiny.load("Q4_1", threads=1, kv_memory=4 * unit + 100)
    kv = model.kv
    assert kv.limit == 4 * unit + 100
    assert kv.block == BLOCK
    assert kv.bytes_for(1) == kv.bytes_for(64) == unit == 64 * model.info.kv_bytes_per_position
    a, b = kv.alloc(), kv.alloc()
    assert kv.bytes == model._handle.kv_held == 0
    feed(model, a, np.zeros(100, np.int32))
    feed(model, b, np.zeros(60, np.int32))
    assert kv.bytes == 3 * unit
    tokens = [np.zeros(n, np.int32) for n in (30, 5)]
    assert [kv.growth(row, len(t)) for row, t in zip((a, b), tokens, strict=True)] == [unit, unit]
    with pytest.raises(MemoryLimitError, match=f"{2 * unit} bytes .* only {unit + 100} of .* raise kv_memory"):
        model.forward(Batch.pack([a, b], tokens, [100, 60], [True] * 2))
    kv.check()
    assert (kv.length(a), kv.length(b), kv.bytes) == (100, 60, 3 * unit)
    model.forward(Batch.pack([a, b], [tokens[0], tokens[1][:4]], [100, 60], [True] * 2))
    assert kv.bytes == kv.exclusive([a, b]) == 4 * unit
    kv.truncate(a, 64)
    assert kv.bytes == 2 * unit
    kv.free(a)
    kv.free(b)
    assert kv.bytes == 0
    assert kv.rows == []
    assert model._handle.kv_held == 4 * unit  # spares, for the next rows
    kv.check()


def test_compacting_what_is_shared_needs_room(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1, kv_memory=2 * 64 * 256)
    kv = model.kv
    row, other = kv.alloc(), kv.alloc()
    feed(model, row, [1, 2, 3])
    feed(model, row, [4, 5], parents=[-1, -1])
    kv.fork(row, other, 5)
    third = kv.alloc()
    feed(model, third, [1])
    with pytest.raises(MemoryLimitError, match="raise kv_memory"):
        kv.compact(row, 3, np.array([1], np.int32))
    assert (kv.length(row), kv.length(other)) == (5, 5)
    kv.compact(other, 3, np.array([0], np.int32))  # nothing moves, so nothing is copied
    kv.free(third)
    kv.compact(row, 3, np.array([1], np.int32))
    kv.check()
    alone = kv.alloc()
    kv.free(other)
    assert np.array_equal(feed(model, row, [6])[-1], feed(model, alone, [1, 2, 3, 5, 6])[-1])


def test_misuse_is_refused(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row, other = model.kv.alloc(), model.kv.alloc()
    feed(model, row, [1, 2, 3])
    feed(model, other, [1])
    for call in (
        lambda: model.kv.truncate(row, 4),
        lambda: model.kv.truncate(row, -1),
        lambda: model.kv.compact(row, 1, np.array([1, 0], np.int32)),
        lambda: model.kv.compact(row, 1, np.array([2], np.int32)),
        lambda: model.kv.compact(row, 9, np.array([], np.int32)),
        lambda: model.kv.fork(row, row, 1),
        lambda: model.kv.fork(row, other, 1),
        lambda: model.kv.fork(other, row, 2),
        lambda: model.kv.growth(row, -1),
        lambda: model.kv.bytes_for(1 << 40),
    ):
        with pytest.raises(ValueError):
            call()
    for call in (
        model.kv.length,
        model.kv.free,
        lambda row: model.kv.fork(row, other, 0),
        lambda row: model.kv.exclusive([row]),
    ):
        with pytest.raises(IndexError, match="not in use"):
            call(5)
    assert model.kv.length(row) == 3
    model.kv.check()


def test_a_full_length_row(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1, max_length=20)
    assert model.info.max_length == 20
    row = model.kv.alloc()
    feed(model, row, np.zeros(20, np.int32))
    with pytest.raises(ValueError, match="beyond the model's 20"):
        feed(model, row, [0])
    model.kv.check()


@pytest.mark.parametrize(
    "change",
    [
        {"token": [100]}, {"token": [-1]}, {"row": [3]}, {"position": [1]}, {"parent": [0]}, {"parent": [-2]},
        {"starts": [0, 2]}, {"starts": [0]}, {"wanted": [1]}, {"wanted": [-1]}, {"layers": 3}, {"hidden_layers": (2,)},
        {"row": [0, 0]},
    ],
)  # fmt: skip
def test_malformed_batches_change_nothing(change: dict[str, Any], tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc()
    good: dict[str, Any] = {
        "token": [1], "row": [row], "position": [0], "parent": [-1], "starts": [0, 1], "wanted": [0],
    }  # fmt: skip
    arrays = {k: v if k in ("hidden_layers", "layers") else np.array(v, np.int32) for k, v in (good | change).items()}
    with pytest.raises((ValueError, IndexError)):
        model.forward(Batch(**arrays))
    assert model.kv.length(row) == 0
    model.forward(Batch(**{k: np.array(v, np.int32) for k, v in good.items()}))


def test_hidden_states_and_short_forwards(tiny: Tiny, rng: np.random.Generator) -> None:
    model = tiny.load("F32", threads=2, sizes={"layers": 4})
    tokens = rng.integers(0, 100, 140).astype(np.int32)
    row, other = model.kv.alloc(), model.kv.alloc()
    at = np.arange(140, dtype=np.int32)
    full = model.forward(Batch.pack([row], [tokens], [0], [True], hidden_layers=(0, 3, 1)))
    short = model.forward(Batch.pack([other], [tokens], [0], [True], hidden_layers=(1,), layers=2))
    assert full.hidden_states(at).numpy().shape == (140, 3, 64)
    assert np.array_equal(full.hidden_states(at).numpy()[:, 2], short.hidden_states(at).numpy()[:, 0])
    assert not np.array_equal(full.logits(at), short.logits(at))
    with pytest.raises(IndexError):
        full.hidden_states(np.array([140], np.int32))
    model.kv.truncate(row, 139)  # a narrow forward takes another way to its hidden states
    again = model.forward(Batch.pack([row], [tokens[139:]], [139], [True], hidden_layers=(0, 3, 1)))
    assert np.array_equal(again.hidden_states(np.array([0], np.int32)).numpy(), full.hidden_states(at[139:]).numpy())


def test_only_wanted_positions_have_logits(tiny: Tiny) -> None:
    model = tiny.load("Q4_1", threads=1)
    row = model.kv.alloc()
    output = model.forward(Batch.pack([row], [np.arange(5, dtype=np.int32)], [0], [False]))
    with pytest.raises(IndexError, match="not wanted"):
        output.logits(np.array([4], np.int32))
