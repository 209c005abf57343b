"""GGUF files of transformers models, as llama.cpp's converter makes them; tensors have the gguf package's own names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from outpace.common.arrays import F32


def export(model: Any, architecture: str, path: Path, *, leave_out: str = "", frequencies: F32 | None = None) -> Path:
    """Write ``model``, float32. ``leave_out``: a tensor; ``frequencies``: divisors of its rotations."""
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
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        pattern = config.layer_types.index("full_attention") + 1
        if pattern != 6:  # the format's default
            writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            factor = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
            for name in ("short", "long"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if architecture in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored != leave_out:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
