"""An EAGLE-3 drafter as a GGUF file of llama.cpp's eagle3; its keys fc_norm and norm_output are not read there yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.eagle import load, place
from benchmarks.peers.requantise import copy_field, writing

TYPE = gguf.GGMLQuantizationType.Q4_0  # the target's, and the fastest


def eagle_gguf(drafter: Path, model: Path) -> Path:
    """The file, written on first use. Raises ParameterError, ModelError, DrafterError as ``load`` does."""
    made = place(drafter, model, "gguf")
    if made.exists():
        return made
    config, tensors = load(drafter, model)
    shape = config.decoder
    with writing(made, "eagle3") as writer:
        writer.add_name(drafter.resolve().name)
        writer.add_block_count(1)
        writer.add_context_length(shape.max_length)
        writer.add_embedding_length(shape.hidden)
        writer.add_feed_forward_length(shape.ffn)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
        writer.add_rope_dimension_count(shape.head_dim)
        writer.add_rope_freq_base(shape.rope_theta)
        writer.add_layer_norm_rms_eps(shape.eps)
        writer.add_vocab_size(config.vocab)
        writer.add_array("eagle3.target_layers", [k + 1 for k in config.hidden_layers])  # their inputs, ours: outputs
        writer.add_uint32("eagle3.target_hidden_size", shape.hidden)
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            writer.add_bool(f"eagle3.{flag}", getattr(config, flag))
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, field in gguf.GGUFReader(model).fields.items():
            if name.startswith("tokenizer."):
                copy_field(writer, name, field)
        ids = np.arange(config.draft_vocab) + tensors["d2t"]
        writer.add_tensor("d2t", ids, raw_dtype=gguf.GGMLQuantizationType.I64)
        if config.fc_norm:
            norms = [tensors[f"fc_norm.{i}.weight"] for i in range(len(config.hidden_layers))]
            writer.add_tensor("enc.output_norm.weight", np.stack(norms))
        if config.norm_before_fc:
            writer.add_tensor("enc.output_norm.weight", tensors["input_norm.weight"])
        at = "layers.0."
        for name, ours in {
            "blk.0.attn_norm": at + "input_layernorm",
            "blk.0.attn_norm_2": at + "hidden_norm",
            "blk.0.ffn_norm": at + "post_attention_layernorm",
            "output_norm": "norm",
        }.items():
            writer.add_tensor(f"{name}.weight", tensors[f"{ours}.weight"])
        for name, values in {
            "fc": tensors["fc.weight"],
            "blk.0.attn_q": pairs(tensors[at + "self_attn.q_proj.weight"], shape.heads),
            "blk.0.attn_k": pairs(tensors[at + "self_attn.k_proj.weight"], shape.kv_heads),
            "blk.0.attn_v": tensors[at + "self_attn.v_proj.weight"],
            "blk.0.attn_output": tensors[at + "self_attn.o_proj.weight"],
            **{f"blk.0.ffn_{short}": tensors[f"{at}mlp.{short}_proj.weight"] for short in ("gate", "up", "down")},
            "output": tensors["lm_head.weight"],
        }.items():
            writer.add_tensor(f"{name}.weight", gguf.quantize(np.ascontiguousarray(values), TYPE), raw_dtype=TYPE)
    return made


def pairs(values: Any, heads: int) -> Any:
    """Each head's halves as pairs, which llama.cpp rotates."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
