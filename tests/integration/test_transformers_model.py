"""GGUF files as transformers models, choices made where the logits lie, and the demo model against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace.arrays import F32, I32
from outpace.errors import MemoryLimitError, ModelError
from outpace.exact.noise import Noise
from outpace.exact.rules import Bias
from outpace.exact.sampling import Chooser
from outpace.models.base import Batch
from outpace.models.formats.gguf import GGUFFile
from outpace.models.load import LoadOptions, estimate, load, resolve
from outpace.models.torch import gguf as gguf_transformers
from outpace.models.torch.kv import LayerShape, TorchKV
from outpace.models.torch.model import TorchOutput, TransformersModel
from outpace.params import SamplingParams

from .test_architectures import COMMON, GEMMA, close, text, tiny

# -- GGUF files made from tiny models, as llama.cpp's converter makes them ---------------------------------------------

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def stored_name(name: str, parts: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{parts[rest]}.{kind}"


def export(model: Any, architecture: str, path: Path, *, leave_out: str = "", frequencies: F32 | None = None) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        pattern = config.layer_types.index("full_attention") + 1
        if pattern != 6:  # the format's default
            writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        stored = stored_name(name, GEMMA_PARTS if architecture == "gemma3" else PARTS)
        if stored != leave_out:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def own(module: Any, tokens: I32) -> F32:
    with torch.inference_mode():
        logits: F32 = (
            module(input_ids=torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()
        )
    return logits


def built(path: Path) -> Any:
    return gguf_transformers.build(GGUFFile.open(path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "family", "changes"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 12}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", COMMON | {"head_dim": 16}),
        ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
        ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 5, "sliding_window_pattern": 2}),
    ],
)
def test_gguf_is_the_original_model(architecture: str, family: str, changes: Any, tmp_path: Path) -> None:
    original = tiny(family, **changes)
    path = export(original, architecture, tmp_path / "m.gguf")
    module = built(path)
    t = text(40, 1)
    np.testing.assert_allclose(own(module, t), own(original, t), rtol=1e-6, atol=1e-6)
    model = TransformersModel(module, name="m")
    row = model.kv.alloc(40)
    for at in (slice(0, 25), slice(25, 26), slice(26, 40)):
        batch = Batch.pack([row], [t[at]], [at.start], [True])
        close(model.forward(batch).logits(batch.wanted), own(original, t)[at])
    taken = estimate(str(path), LoadOptions(backend="transformers", dtype="float32"))
    assert (taken.weights, taken.kv_bytes_per_position) == (model.info.weight_bytes, model.info.kv_bytes_per_position)


def test_gguf_frequencies(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = tiny("llama", rope_parameters=rope | {"original_max_position_embeddings": 32})
    plain = 1.0 / 1e4 ** (np.arange(0, 8, 2, dtype=np.float32) / 8)
    divisors = (plain / original.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 2
    module = built(export(original, "llama", tmp_path / "m.gguf", frequencies=divisors))
    t = text(60, 2)
    np.testing.assert_allclose(own(module, t), own(original, t), rtol=1e-4, atol=1e-4)


def test_gguf_without_a_tensor_names_it(tmp_path: Path) -> None:
    path = export(tiny("llama"), "llama", tmp_path / "m.gguf", leave_out="blk.2.ffn_up.weight")
    with pytest.raises(ModelError, match=r"m.gguf is incomplete.*model.layers.2.mlp.up_proj.weight"):
        built(path)


def test_gguf_with_a_wrong_shape_names_it(tmp_path: Path) -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros(40, 32)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight is \[40, 32\], but must be \[48, 32\]"):
        built(export(model, "llama", tmp_path / "m.gguf"))


# -- the output --------------------------------------------------------------------------------------------------------


def chooser(params: SamplingParams | None = None, **kw: Any) -> Chooser:
    return Chooser(params or SamplingParams(), Noise(3), 0, **kw)


def output(logits: list[list[float]], wanted: list[int]) -> TorchOutput:
    return TorchOutput(np.array(wanted, np.int32), torch.tensor(logits), [])


def test_greedy_choices_take_the_lowest_id_on_ties() -> None:
    out = output([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0], [0.0, 0.0, 1.0]], [4, 6, 9])
    assert out.choose(np.array([4, 6, 9], np.int32), [chooser()] * 3).tolist() == [1, 0, 2]
    assert out.choose(np.array([9, 4], np.int32), [chooser()] * 2).tolist() == [2, 1]
    assert out.choose(np.array([9], np.int32), [chooser()]).dtype == np.int32


def test_other_choices_are_made_on_the_host() -> None:
    out = output([[0.0, 2.0, 1.9], [3.0, 1.0, 3.0]], [0, 1])
    bias = Bias(np.array([1], np.int32), np.array([-5], np.float32))
    at = np.array([0, 1], np.int32)
    assert out.choose(at, [chooser(rules=(bias,), states=(None,)), chooser()]).tolist() == [2, 0]
    warm = chooser(SamplingParams(temperature=1.0, seed=1))
    assert out.choose(at, [warm, warm]).tolist() == [warm.choose(row) for row in out.logits(at)]
    assert out.logprobs(at[:1], np.array([1], np.int32), [2])[0].top[0][0] == 1


def test_nan_is_reported_not_chosen() -> None:
    with pytest.raises(FloatingPointError, match="NaN"):
        output([[0.0, float("nan"), 1.0]], [0]).choose(np.array([0], np.int32), [chooser()])


def test_taps_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="no hidden states were asked for"):
        output([[0.0]], [0]).taps(np.array([0], np.int32))


# -- the cache ---------------------------------------------------------------------------------------------------------


def cache(limit: int | None = None, *, uneven: bool = False) -> TorchKV:
    shapes = [LayerShape(2, 4, 6), LayerShape(1, 8, 4)] if uneven else [LayerShape(2, 4, 4)] * 3
    return TorchKV(shapes, torch.float32, torch.device("cpu"), limit)


def fill(kv: TorchKV, row: int, n: int) -> None:
    """Slot s holds the number s everywhere."""
    keys, values = kv.tensors(row)
    for tensor in (*keys, *values):
        tensor[:, :n] = torch.arange(n, dtype=torch.float32)[:, None]
    kv.lengthen(row, n)


def slots(kv: TorchKV, row: int) -> list[float]:
    keys, values = kv.tensors(row)
    seen = [t[:, : kv.length(row)].amax((0, 2)).tolist() for t in (*keys, *values)]
    assert all(s == seen[0] for s in seen)
    assert all(bool((t[:, : kv.length(row)] == t[:1, : kv.length(row), :1]).all()) for t in (*keys, *values))
    return seen[0]


@pytest.mark.parametrize("uneven", [False, True])
def test_cache_arithmetic(uneven: bool) -> None:
    kv = cache(uneven=uneven)
    a, b = kv.alloc(10), kv.alloc(6)
    assert (a, b, kv.rows) == (0, 1, [0, 1])
    fill(kv, a, 9)
    kv.fork(a, b, 5)
    assert slots(kv, b) == [0, 1, 2, 3, 4]
    kv.compact(a, 4, np.array([0, 2, 4], np.int32))
    assert slots(kv, a) == [0, 1, 2, 3, 4, 6, 8]
    kv.compact(a, 5, np.array([0, 1], np.int32))
    assert slots(kv, a) == [0, 1, 2, 3, 4, 6, 8]
    kv.compact(a, 3, np.zeros(0, np.int32))
    assert slots(kv, a) == [0, 1, 2]
    kv.truncate(b, 2)
    assert slots(kv, b) == [0, 1]
    kv.fork(b, b, 1)
    assert kv.length(b) == 1
    assert kv.bytes == kv.bytes_for(10) + kv.bytes_for(6)
    kv.check()
    kv.free(a)
    assert kv.alloc(3) == 0
    kv.free(0)
    kv.free(b)
    assert (kv.bytes, kv.rows) == (0, [])
    kv.check()


def test_cache_is_bounded() -> None:
    kv = cache(limit=1000)
    assert kv.bytes_for(1) == 3 * 2 * 2 * 4 * 4
    kv.alloc(5)
    with pytest.raises(MemoryLimitError, match=r"6 positions needs 1152 bytes.*40 of 1000 are free"):
        kv.alloc(6)
    assert kv.rows == [0]
    kv.check()


def test_cache_refuses_nonsense() -> None:
    kv = cache()
    row, small = kv.alloc(4), kv.alloc(2)
    fill(kv, row, 4)
    for wrong in (
        lambda: kv.truncate(row, 5),
        lambda: kv.truncate(row, -1),
        lambda: kv.compact(row, 2, np.array([1, 0], np.int32)),
        lambda: kv.compact(row, 2, np.array([0, 2], np.int32)),
        lambda: kv.fork(row, small, 3),
        lambda: kv.fork(small, row, 1),
        lambda: kv.room(row, 1),
        lambda: kv.room(77, 1),
        lambda: kv.alloc(0),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert slots(kv, row) == [0, 1, 2, 3]


# -- the demo model ----------------------------------------------------------------------------------------------------


def test_demo_says_what_its_own_forward_says() -> None:
    reference = built(resolve("demo").path)
    model, tokenizer = load("demo", LoadOptions(backend="transformers", device="cpu"))
    assert model.info.weight_bytes == estimate("demo", LoadOptions(backend="transformers", device="cpu")).weights
    tokens = tokenizer.encode(
        "The river rises in the mountains and flows 1,024 km to the sea.\n\ndef area(r):\n    return 3.14159 * r ** 2\n"
        "La rivière prend sa source dans les montagnes. 河は山から海へ流れる。"
    )
    expected = own(reference, tokens)
    row = model.kv.alloc(len(tokens))
    found = []
    for begin in range(0, len(tokens), 13):
        chunk = tokens[begin : begin + 13]
        batch = Batch.pack([row], [chunk], [begin], [True])
        out = model.forward(batch)
        assert (
            out.choose(batch.wanted, [chooser()] * len(chunk)).tolist()
            == expected[begin : begin + 13].argmax(-1).tolist()
        )
        found.append(out.logits(batch.wanted))
    assert float(np.abs(np.concatenate(found) - expected).max()) < 2e-4
