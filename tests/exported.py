"""GGUF files of transformers models, as llama.cpp's converter makes them; tensors have the gguf package's own names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from outpace.common.arrays import F32

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of their number
WORDS = ["<s>", "</s>", *(chr(c) for c in range(33, 127)), "Ġ", "ab"]  # of ``tokenizer``


def export(
    model: Any, architecture: str, path: Path, *, leave_out: str = "", frequencies: F32 | None = None,
    more: Mapping[str, Any] | None = None, extra: str = "", tokenizer: bool = False, head: Any = None,
    joined: str = "",
) -> Path:  # fmt: skip
    """Write ``model``, float32. ``leave_out``: a tensor; ``extra``: one of ones; ``frequencies``: divisors of
    its rotations; ``more``: of the architecture's metadata, strings and floats; ``head``: a layer that drafts;
    ``joined``: what makes keys and values of latent vectors stands together, as in old files, of this type."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + (head is not None))
    if head is not None:
        writer.add_nextn_predict_layers(1)
    inner: Any = getattr(config, "intermediate_size", 4 * config.hidden_size)
    blocks = getattr(config, "layers_block_type", None) if config.model_type == "nemotron_h" else None
    if blocks is not None:
        inner = [(kind == "moe") * config.moe_intermediate_size + (kind == "mlp") * inner for kind in blocks]
    if architecture == "lfm2":
        inner = model.model.layers[0].feed_forward.w1.out_features
    kinds = getattr(config, "layer_types", None) or []
    if getattr(config, "use_double_wide_mlp", False):
        first = config.num_hidden_layers - config.num_kv_shared_layers
        inner = [inner * (1 + (i >= first)) for i in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    if architecture != "gemma4":  # whose layers differ in it
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture == "deepseek2":
        rank, width = config.kv_lora_rank, config.qk_rope_head_dim
        writer.add_head_count_kv(1)
        writer.add_kv_lora_rank(rank)
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_key_length(rank + width)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + width)
        writer.add_value_length_mla(config.v_head_dim)
    elif architecture == "gemma4":
        add_gemma4(writer, config)
    elif hasattr(config, "num_key_value_heads"):
        keys = config.num_key_value_heads
        apart = "conv" in kinds or architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
        writer.add_head_count_kv(
            [keys * (kind in ("full_attention", "attention")) for kind in kinds] if apart else keys
        )
        writer.add_key_length(width)
        writer.add_value_length(width)
    eps = next(
        (getattr(config, n) for n in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if hasattr(config, n)), None
    )
    if eps is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(1e-5)
    if rope := getattr(config, "rope_parameters", None):
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        if architecture != "gemma4":
            writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1)))
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for end in ("fast", "slow"):
                if f"beta_{end}" in rope:
                    writer.add_float32(f"{architecture}.rope.scaling.yarn_beta_{end}", rope[f"beta_{end}"])
            if architecture == "deepseek2":
                writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
            if "attention_factor" in rope:  # beside what yarn makes of the factor
                writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * math.log(rope["factor"]) + 1))
    if architecture == "mistral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        else:  # which the converter does not write
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "olmo2" and getattr(config, "sliding_window", None):  # OLMo 3
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture in ("gemma2", "gemma3", "gemma4", "phi3", "starcoder2", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture in ("lfm2", "lfm2moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        pattern = config.layer_types.index("full_attention") + 1
        if pattern != 6:  # the format's default
            writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
    if architecture == "granitehybrid":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if architecture == "falcon-h1":
        state = _multiplied(state, config)
        writer.add_vocab_size(config.vocab_size)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
    if blocks is not None:
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_rope_scaling_finetuned(False)
    if architecture in ("granite", "granitemoe", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "phi3":
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            factor = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
            for name in ("short", "long"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), None)
    if experts and architecture != "nemotron_h":
        writer.add_expert_count(experts)
        writer.add_expert_used_count(getattr(config, "top_k_experts", None) or config.num_experts_per_tok)
        inner = getattr(config, "moe_intermediate_size", None)
        if inner is not None:
            writer.add_expert_feed_forward_length(inner)
        if architecture in ("qwen2moe", "qwen35moe", "qwen3next"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
        if architecture == "nemotron_h_moe":
            writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_group_count(config.n_group)
        if architecture == "lfm2moe":
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if architecture == "glm4moe":
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_leading_dense_block_count(config.first_k_dense_replace)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
        if architecture == "deepseek2":
            writer.add_expert_shared_count(config.n_shared_experts)
            dense = getattr(config, "first_k_dense_replace", None)
            kinds = getattr(config, "mlp_layer_types", None)
            writer.add_leading_dense_block_count(kinds.index("sparse") if dense is None else dense)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            if config.model_type == "deepseek_v2":
                writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
            else:
                writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
                if config.norm_topk_prob:
                    writer.add_expert_weights_norm(True)
            if config.n_group is not None:
                writer.add_expert_group_count(config.n_group)
                writer.add_expert_group_used_count(config.topk_group)
        if architecture == "ernie4_5-moe":
            writer.add_expert_shared_count(config.moe_num_shared_experts)
            writer.add_leading_dense_block_count(config.moe_layer_start_index)
            writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    for key, value in (more or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{architecture}.{key}", value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(WORDS)
        writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(0)
        writer.add_chat_template("{{ messages[0]['content'] }}")
    if blocks is not None:
        state = {name.replace("model.", "backbone.", 1): values for name, values in state.items()}
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers + 1)
    for name, values in (*_tensors(state, config), *_head(head, config)):
        if "kv_b_proj" in name and joined:
            old = gguf.GGMLQuantizationType[joined]
            place = f"blk.{name.split('.')[2]}.attn_kv_b.weight"
            writer.add_tensor(place, gguf.quants.quantize(values, old), raw_dtype=old)
            continue
        if "kv_b_proj" in name:
            for part, rows in zip(("k_b", "v_b"), _by_head(values, config), strict=True):
                writer.add_tensor(f"blk.{name.split('.')[2]}.attn_{part}.weight", np.ascontiguousarray(rows))
            continue
        if name.startswith("blk."):
            writer.add_tensor(name, np.ascontiguousarray(values))
            continue
        if name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.scale", np.ascontiguousarray(values))
            continue
        if "conv.conv" in name:
            values = values[:, 0]
        if "in_proj_qkvz" in name:
            layer = name.split(".")[2]
            for part, rows in zip(("qkv", "gate"), _unwoven(values, config), strict=True):
                writer.add_tensor(f"blk.{layer}.attn_{part}.weight", np.ascontiguousarray(rows))
            continue
        if "linear_attn" in name:
            name, values = _of_net(name, values, config)
        if "mamba" in name or (blocks is not None and "mixer" in name):
            name = name.replace("dt_bias", "dt.bias" if blocks else "dt_proj.bias")
            values = values[:, 0] if "conv1d.weight" in name else values
            values = -np.exp(values) if "A_log" in name else values
            if name.endswith(("A_log", ".D")):
                values = values[:, None]
            if "mamba.norm" in name or "mixer.norm" in name:
                values = values.reshape(getattr(config, "mamba_n_groups", None) or config.n_groups, -1)
        if architecture in ("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3") and (
            "q_proj" in name or "k_proj" in name
        ):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if (
            architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
            and "norm" in name
            and "linear_attn" not in name
        ):
            values = values + 1
        if architecture == "gpt2" and ".h." in name and values.ndim == 2:
            values = values.T
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored != leave_out:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    if extra:
        writer.add_tensor(extra, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _multiplied(state: Any, config: Any) -> dict[str, Any]:
    """Falcon-H1's weights with its multipliers in them."""
    inner, keys = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    sizes = np.array([inner, inner, keys, keys, config.mamba_n_heads])
    parts = np.repeat(np.array(config.ssm_multipliers, np.float32), sizes)[:, None] * config.ssm_in_multiplier
    factors = {
        "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier, "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier, ".o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier, "in_proj": torch.from_numpy(parts),
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    return {
        name: values * next((factor for part, factor in factors.items() if part in name), 1)
        for name, values in state.items()
    }


def add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """What layers have that differ, and the divisors of rotations that leave most angles out."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    each = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    keys = [one.num_key_value_heads for one in each]
    writer.add_head_count_kv(keys if len(set(keys)) > 1 else keys[0])
    full, narrow = each[windowed.index(False)].head_dim, each[windowed.index(True)].head_dim
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(narrow)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(windowed)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    turning = int(full * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    divisors = [1.0] * turning + [1e30] * (full // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _by_head(values: F32, config: Any) -> tuple[F32, F32]:
    """What makes keys of latent vectors, transposed, and values, by head."""
    plain = config.qk_nope_head_dim
    apart = values.reshape(config.num_attention_heads, plain + config.v_head_dim, -1)
    return apart[:, :plain].swapaxes(1, 2), apart[:, plain:]


def _unwoven(values: F32, config: Any) -> tuple[F32, F32]:
    """Queries, keys and values of all heads, and gates, of a matrix that has them by key head."""
    keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    apart = values.reshape(keys, -1, values.shape[1])
    wide = (apart.shape[1] - 2 * dim) // 2
    parts = np.split(apart, np.cumsum([dim, dim, wide]), axis=1)
    flat = [part.reshape(-1, values.shape[1]) for part in parts]
    return np.concatenate(flat[:3]), flat[3]


def _of_net(name: str, values: F32, config: Any) -> tuple[str, F32]:
    """A gated delta net's tensor: value heads stand by their place within a key head's, not by key head."""
    part = name.split("linear_attn.")[1]
    heads, shared = config.linear_num_value_heads, config.linear_num_key_heads

    def tiled(values: F32) -> F32:
        if config.model_type == "qwen3_next":  # whose files keep them by key head
            return values
        apart = values.reshape(shared, heads // shared, len(values) // heads, *values.shape[1:])
        return apart.swapaxes(0, 1).reshape(values.shape)

    if part.startswith("conv1d"):
        values = values[:, 0]
    if part.startswith(("conv1d", "in_proj_qkv")):
        keys = 2 * shared * config.linear_key_head_dim
        values = np.concatenate([values[:keys], tiled(values[keys:])])
    elif part.startswith("out_proj"):
        values = tiled(values.T).T
    elif not part.startswith("norm"):
        values = tiled(values)
    if part == "A_log":
        values = -np.exp(values)
    return name.replace("dt_bias", "dt_proj.bias"), values


def _head(head: Any, config: Any) -> Iterator[tuple[str, F32]]:
    """The tensors of a layer that drafts, by the names of a layer behind the last one."""
    if head is None:
        return
    at, added = config.num_hidden_layers, np.float32(config.model_type.startswith("qwen3"))
    for part, name in (("enorm", "enorm"), ("hnorm", "hnorm"), ("post_norm", "shared_head_norm")):
        yield f"blk.{at}.nextn.{name}.weight", getattr(head, part).weight.detach().numpy() + added
    yield f"blk.{at}.nextn.eh_proj.weight", head.eh_proj.weight.detach().numpy()
    yield from _tensors({f"model.layers.{at}.{k}": v for k, v in head.mtp_block.state_dict().items()}, config)


def _tensors(state: Any, config: Any) -> Iterator[tuple[str, F32]]:
    """By the names that a checkpoint has, but for experts, which a file has joined, gate and up apart."""
    for name, weight in state.items():
        values = weight.numpy()
        woven = config.model_type == "gpt_oss"
        if woven and ("experts.gate_up_proj" in name or "experts.down_proj" in name):
            kind = "bias" if name.endswith("_bias") else "weight"
            rows = values if kind == "bias" else values.swapaxes(1, 2)
            place = name[: name.index("experts.") + len("experts.")]
            if "gate_up" in name:
                yield f"{place}gate_proj.{kind}", rows[:, ::2]
                yield f"{place}up_proj.{kind}", rows[:, 1::2]
            else:
                yield f"{place}down_proj.{kind}", rows
        elif name.endswith(("sinks", "layer_scalar")) or (config.model_type == "gemma4_text" and "experts." in name):
            yield f"{name}.weight", values
        elif name.endswith(("mixer.experts.up_proj", "mixer.experts.down_proj")):
            yield f"{name}.weight".replace("backbone", "model").replace("mixer", "mlp"), values
        elif name.endswith("mixer.gate.e_score_correction_bias"):
            yield name.replace("correction_bias", "correction.bias"), values
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight".replace("block_sparse_moe", "mlp"), half
        elif ".shared_mlp." in name:
            layer, place = (
                name[: name.index("shared_mlp.")],
                "mlp.shared_experts" if config.num_local_experts else "mlp",
            )
            if "output_linear" in name:
                yield f"{layer}{place}.down_proj.weight", values
            else:
                for part, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                    yield f"{layer}{place}.{part}_proj.weight", half
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight".replace("block_sparse_moe", "mlp"), values
        elif name.endswith("e_score_correction_bias"):
            layer = name[: name.index(".mlp.")]
            yield f"{layer}.mlp.gate.e_score_correction.bias", values.reshape(-1)
        elif name.endswith("feed_forward.expert_bias"):
            yield f"{name}.bias", values
        elif name.endswith("shared_expert_gate.weight"):
            yield name, values.reshape(-1)  # as the converter squeezes it
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            yield name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"), values


def vocabulary(
    path: Path, kind: str, tokens: list[str], *, types: list[int], scores: list[float] | None = None,
    ids: Mapping[str, int] | None = None, templates: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write a file with a tokenizer and no weights. ``ids``: of special tokens, by the name in their key;
    ``templates``: of chats, by name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([0.0] * len(tokens) if scores is None else scores)
    if kind == "gpt2":
        writer.add_token_merges(["a b"])
    for name, token in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for name, template in (templates or {}).items():
        writer.add_string("tokenizer.chat_template" + ("" if name == "default" else f".{name}"), template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
