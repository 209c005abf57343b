"""GGUF files of families that only transformers can describe: served, or refused with the reason and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace import Engine, SamplingParams
from outpace.common.installing import install
from outpace.errors import ModelError
from outpace.models.base import Batch
from outpace.models.load import estimate, load
from outpace.models.options import LoadOptions

# Hugging Face's names of a layer's parts, and GGUF's.
GPT2 = {
    "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm", "ln_2": "ffn_norm",
}  # fmt: skip
STABLELM = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
STARCODER2 = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA2 = STABLELM | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OUTER = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
}  # fmt: skip
WORDS = ["<s>", "</s>", *(chr(c) for c in range(33, 127)), "Ġ", "ab"]
COMMON = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "gpt2": ({"vocab_size": len(WORDS), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}, GPT2),
    "stablelm": (COMMON | {"partial_rotary_factor": 0.5}, STABLELM),
    "starcoder2": (COMMON | {"rope_theta": 3000.0, "sliding_window": 11}, STARCODER2),
    "gemma2": (COMMON | {"head_dim": 8, "query_pre_attn_scalar": 256, "sliding_window": 4096}, GEMMA2),
}


def made(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **CONFIGS[family][0])
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return module


def write(
    path: Path, family: str, module: Any, *, leave_out: str = "", more: dict[str, Any] | None = None, extra: str = ""
) -> Path:
    """``module`` as llama.cpp's converter would write it."""
    out = gguf.GGUFWriter(path, family)
    config = module.config
    out.add_context_length(96)
    out.add_embedding_length(32)
    out.add_feed_forward_length(128 if family == "gpt2" else 64)
    out.add_block_count(2)
    out.add_head_count(4)
    if family != "gpt2":
        out.add_head_count_kv(2)
        out.add_rope_dimension_count(4 if family == "stablelm" else 8)
    if family == "starcoder2":
        out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family in ("starcoder2", "gemma2"):
        out.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        out.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        out.add_layer_norm_eps(1e-5)
    if family == "gemma2":
        out.add_key_length(8)
        out.add_value_length(8)
        out.add_attn_logit_softcapping(50.0)
        out.add_final_logit_softcapping(30.0)
    for key, value in (more or {}).items():
        add = out.add_string if isinstance(value, str) else out.add_float32
        add(f"{family}.{key}", value)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list(WORDS)
    out.add_token_types([3, 3] + [1] * (len(WORDS) - 2))
    out.add_token_merges(["a b"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(1)
    out.add_pad_token_id(0)
    out.add_chat_template("{{ messages[0]['content'] }}")
    names = CONFIGS[family][1]
    tied = config.tie_word_embeddings
    for name, tensor in module.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if tied and stem == "lm_head":
            continue
        if stem in OUTER:
            own = OUTER[stem]
        else:
            block, _, part = stem.split(".", 2)[2].partition(".")
            own = f"blk.{block}.{names[part]}"
        values = tensor.numpy()
        if family == "gpt2" and own.startswith("blk.") and values.ndim == 2:
            values = values.T
        if family == "gemma2" and own.endswith("norm"):
            values = values + 1
        if f"{own}.{kind}" != leave_out:
            out.add_tensor(f"{own}.{kind}", np.ascontiguousarray(values))
    if extra:
        out.add_tensor(extra, np.ones(8, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_of_transformers_is_served(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = made(family)
    path = write(tmp_path / f"{family}.gguf", family, module)
    options = LoadOptions(device="cpu", dtype="float32")
    with caplog.at_level("INFO", logger="outpace"):
        model, tokenizer = load(str(path), options)
    assert f"the architecture '{family}' is not one of llama" in caplog.text
    assert "using transformers" in caplog.text
    assert (model.info.backend, model.info.max_length, model.info.eos_ids) == ("transformers", 96, (1,))
    taken = estimate(str(path), options)
    assert (taken.weights, taken.kv_bytes_per_position) == (model.info.weight_bytes, model.info.kv_bytes_per_position)
    tokens = tokenizer.encode("ab, the quick brown fox; jumps over 123 dogs", add_special=False)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    batch = Batch.pack([model.kv.alloc()], [tokens], [0], [True])
    with torch.inference_mode():
        expected = module(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
    assert np.abs(model.forward(batch).logits(batch.wanted) - expected).max() < 1e-4 * np.abs(expected).max()


def test_generation(tmp_path: Path) -> None:
    path = write(tmp_path / "gpt2.gguf", "gpt2", made("gpt2"))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = []
    for drafter in ("none", "ngram:size=3"):
        with Engine.load(str(path), drafter=drafter, device="cpu") as engine:
            texts.append(engine.generate("ab ab ab ab", params).token_ids)
    assert len(texts[0]) == 24
    assert list(texts[0]) == list(texts[1])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("stablelm", {"leave_out": "blk.1.ffn_up.weight"}, "incomplete: it has no tensor for .*layers.1.mlp.up_proj"),
        ("starcoder2", {"extra": "rope_freqs.weight"}, "'rope_freqs.weight' that a starcoder2 model does not use"),
        ("gpt2", {"more": {"rope.scaling.type": "longrope"}}, "gpt2.rope.scaling.type is 'longrope', where .* 'none'"),
        ("gpt2", {"more": {"rope.freq_base": 100.0}}, "gpt2.rope.freq_base is 100.0"),
        ("gpt2", {"more": {"logit_scale": 0.5}}, "gpt2.logit_scale is 0.5, .*use the original Hugging Face model"),
        ("stablelm", {"more": {"final_logit_softcapping": 5.0}}, "final_logit_softcapping is 5.0"),
    ],
)
def test_what_would_be_another_model_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "other.gguf", family, made(family), **changes)
    with pytest.raises(ModelError, match=message):
        load(str(path), LoadOptions(device="cpu"))


@pytest.mark.parametrize("family", ["bert", "t5", "rwkv6"])
def test_a_family_that_nobody_reads_is_named(family: str, tmp_path: Path) -> None:
    path = bare(tmp_path, family)
    for ask in (load, estimate):
        with pytest.raises(ModelError, match=f"architecture '{family}' is not supported .*original Hugging Face model"):
            ask(str(path), LoadOptions(device="cpu"))


def bare(folder: Path, family: str) -> Path:
    out = gguf.GGUFWriter(folder / f"{family}.gguf", family)
    out.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder / f"{family}.gguf"


def test_without_torch_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outpace.models import load as loading

    path = write(tmp_path / "gpt2.gguf", "gpt2", made("gpt2"))
    find = loading.find_spec
    monkeypatch.setattr(loading, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(
        ModelError, match=rf"'gpt2' is not one of .* not installed: {re.escape(install('outpace[torch]'))}"
    ):
        load(str(path))
