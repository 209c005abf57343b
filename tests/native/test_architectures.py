"""Tiny random models of every architecture against transformers in float32, from folders and from GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from native_helpers import BLOCKS, Tiny, feed
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outpace.errors import ModelError, ParameterError
from outpace.models import rope
from outpace.models.decoder import from_folder
from outpace.models.load import load
from outpace.models.native.build import estimate
from outpace.models.native.model import load_native
from outpace.models.options import LoadOptions
from outpace.models.weights.gguf import GGUFFile
from outpace.models.weights.safetensors import read_folder, write
from tests.exported import export

COMMON: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA4: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 120,
    "sliding_window": 12, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 5.0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 8, "moe_intermediate_size": 40, "n_shared_experts": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN | {"beta_fast": 8.0, "attention_factor": 1.3}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 24}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-window": ("Phi3", {"sliding_window": 20, "hidden_size": 96, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
    }}),
    "phi3-long": ("Phi3", {
        "sliding_window": 512, "original_max_position_embeddings": 200, "hidden_size": 128, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.5, 1.9, 2.5, 3.0, 3.5, 4.0], "long_factor": [1.0, 2.0, 4.0, 8.0] * 2,
        },
    }),
    "granite": ("Granite", {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0,
        "attention_bias": True,
    }),
    "granite4": ("GraniteMoeHybrid", {
        "layer_types": ["attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 96,
        "position_embedding_type": "rope", "attention_multiplier": 0.2, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 8.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "granite4-hybrid": ("GraniteMoeHybrid", {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "shared_intermediate_size": 112,
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
        "attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    }),
    "granite4-experts": ("GraniteMoeHybrid", {
        "layer_types": ["mamba", "mamba", "attention"], "num_local_experts": 6, "num_experts_per_tok": 3,
        "intermediate_size": 40, "shared_intermediate_size": 80, "mamba_n_heads": 2, "mamba_d_head": 64,
        "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_d_conv": 3, "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    }),
    "nemotron_h": ("NemotronH", {
        "time_step_min": 1e-9,  # see docs/recurrent.md
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": 5, "head_dim": 24, "mamba_num_heads": 4, "mamba_head_dim": 80, "ssm_state_size": 16,
        "n_groups": 2,
    }),
    "nemotron_h-experts": ("NemotronH", {
        "time_step_min": 1e-9,  # see docs/recurrent.md
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        "num_hidden_layers": 5, "head_dim": 16, "mamba_num_heads": 2, "mamba_head_dim": 64, "ssm_state_size": 32,
        "n_groups": 1, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 80, "routed_scaling_factor": 1.7,
    }),
    "nemotron_h-layers": ("NemotronH", {
        "time_step_min": 1e-9,  # see docs/recurrent.md
        "layers_block_type": ["moe", "linear_attention", "linear_attention", "mlp", "full_attention"],
        "num_hidden_layers": 5, "head_dim": 16, "mamba_num_heads": 2, "mamba_head_dim": 48, "ssm_state_size": 16,
        "n_groups": 2, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 80, "norm_topk_prob": False,
    }),
    "falcon_h1": ("FalconH1", {
        "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_n_groups": 2,
        "head_dim": 24, "mlp_multipliers": [0.6, 1.7], "ssm_multipliers": [0.5, 1.4, 0.7, 1.3, 0.4],
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.4, "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6,
    }),
    "falcon_h1-normed": ("FalconH1", {  # powers of 2, which change no digit of a weight
        "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_ssm": None, "mamba_d_state": 32, "mamba_d_conv": 3,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_multipliers": [0.5, 2.0],
        "ssm_multipliers": [0.5, 2.0, 0.25, 1.0, 4.0], "lm_head_multiplier": 0.5, "attention_in_multiplier": 0.5,
    }),
    "ministral": ("Ministral", {
        "head_dim": 16,
        "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "ministral3": ("Ministral3", {
        "head_dim": 24, "rope_parameters": YARN | {
            "original_max_position_embeddings": 32, "factor": 16.0, "llama_4_scaling_beta": 0.4, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }),
    "seed_oss": ("SeedOss", {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "olmo3-yarn": ("Olmo3", {
        "num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": YARN | {"rope_theta": 5e5},
    }),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 20}),
    "qwen2_moe": ("Qwen2Moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80,
    }),
    "qwen2_moe-layers": ("Qwen2Moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80,
        "num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": True,
        "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2,
    }),
    "qwen3_moe": ("Qwen3Moe", {
        "num_experts": 70, "num_experts_per_tok": 8, "moe_intermediate_size": 32, "head_dim": 32,
        "norm_topk_prob": True,
    }),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite_moe": ("GraniteMoe", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.1, "logits_scaling": 8.0,
    }),
    "glm4_moe": ("Glm4Moe", {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2,
        "attention_bias": True, "use_qk_norm": True, "head_dim": 24, "routed_scaling_factor": 1.7,
    }),
    "glm4_moe-plain": ("Glm4Moe", {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    }),
    "deepseek_v3": ("DeepseekV3", LATENT | {
        "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "deepseek_v3-plain": ("DeepseekV3", LATENT | {
        "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
        "norm_topk_prob": False, "rope_interleave": False, "num_attention_heads": 34, "num_key_value_heads": 34,
        "v_head_dim": 16,
    }),
    "deepseek_v2": ("DeepseekV2", LATENT | {
        "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 16.0,
    }),
    "deepseek_v2-lite": ("DeepseekV2", LATENT | {
        "q_lora_rank": None, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_method": "greedy",
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | {
        "q_lora_rank": 40, "num_experts_per_tok": 3, "rms_norm_eps": 1e-6,
    }),
    "gpt_oss": ("GptOss", {
        "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 20,
        "num_hidden_layers": 4, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128,
        },
    }),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 1,
        "num_hidden_layers": 5, "moe_layer_interval": 2, "moe_layer_start_index": 2,
    }),
    "qwen3_5": ("Qwen3_5", {
        "head_dim": 32, "num_hidden_layers": 5, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }),
    "qwen3_5_moe": ("Qwen3_5Moe", {
        "head_dim": 32, "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80,
    }),
    "qwen3_next": ("Qwen3Next", {
        "head_dim": 32, "num_hidden_layers": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 80,
    }),
    "qwen3_next-layers": ("Qwen3Next", {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 80, "mlp_only_layers": [1], "norm_topk_prob": False,
    }),
    "lfm2_moe": ("Lfm2Moe", {
        "num_hidden_layers": 5, "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 2,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    }),
    "lfm2_moe-plain": ("Lfm2Moe", {
        "layer_types": ["conv", "full_attention", "conv"], "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "num_dense_layers": 0, "routed_scaling_factor": 1.7, "norm_topk_prob": False,
    }),
    "lfm2": ("Lfm2", {
        "num_hidden_layers": 5, "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
        "block_multiple_of": 16, "intermediate_size": 200, "tie_word_embeddings": False,
    }),
    "lfm2-tied": ("Lfm2", {
        "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 4,
    }),
    "qwen3_5-odd": ("Qwen3_5", {
        "head_dim": 16, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_key_head_dim": 48, "linear_value_head_dim": 96, "linear_num_key_heads": 1,
        "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True,
    }),
    "gemma2": ("Gemma2", {
        "head_dim": 32, "num_hidden_layers": 4, "sliding_window": 12, "query_pre_attn_scalar": 50,
        "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
    }),
    "gemma3": ("Gemma3", {
        "head_dim": 32, "num_hidden_layers": 7, "sliding_window": 12, "query_pre_attn_scalar": 50,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "gemma4": ("Gemma4", GEMMA4 | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4-wide": ("Gemma4", GEMMA4 | {"global_head_dim": 272, "attention_bias": True, "attention_k_eq_v": True}),
    "gemma4-inputs": ("Gemma4", GEMMA4 | {
        "hidden_size_per_layer_input": 24, "num_hidden_layers": 6, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }),
    "gemma4-experts": ("Gemma4", GEMMA4 | {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }),
}  # fmt: skip


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    family, extra = FAMILIES[name]
    text = "Text" if family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else ""
    config_class = getattr(transformers, f"{family}{text}Config")
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**(COMMON | extra | changes)))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # nothing at its resting value
            spread = 0.3 if parameter.dim() == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
            if "norm" in parameter_name and family not in ("Gemma2", "Gemma3"):
                parameter.abs_()
        for buffer_name, buffer in model.named_buffers():
            if "layer_scalar" in buffer_name:
                buffer.add_(torch.rand_like(buffer))
            if "e_score_correction_bias" in buffer_name or "expert_bias" in buffer_name:
                buffer.add_(torch.randn_like(buffer) * 0.3)
    model.to(dtype).save_pretrained(folder)
    return model.to(torch.float32).eval()


def reference(model: Any, tokens: Any) -> Any:
    with torch.inference_mode():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))[None]).logits[0].numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_folder_in_float32(name: str, isa: str, tmp_path: Path, rng: np.random.Generator) -> None:
    theirs = saved(name, tmp_path)
    ours = load_native(tmp_path, dtype="float32", kv_dtype="float32", isa=isa, threads=2)
    tokens = rng.integers(0, 120, 150)
    expected = reference(theirs, tokens)
    assert ours.info.dtype == "float32"
    row = ours.kv.alloc()
    assert np.abs(feed(ours, row, tokens) - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "granite_moe", "ernie4_5_moe"])
def test_experts_in_one_tensor(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """As transformers has them in memory, and writes them where it is asked to."""
    model = saved(name, tmp_path / "apart")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    _, tensors = read_folder(tmp_path / "joined")
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in tensors)
    tokens = rng.integers(0, 120, 60)
    found = [load_native(tmp_path / at, dtype="float32", kv_dtype="float32") for at in ("apart", "joined")]
    assert np.array_equal(*(feed(each, each.kv.alloc(), tokens) for each in found))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gpt-oss", "MXFP4"), ("qwen3moe", "Q4_K"), ("qwen2moe", "Q6_K"), ("glm4moe", "Q8_0"), ("granitemoe", "Q5_0")],
)
def test_quantised_experts(architecture: str, kind: str, tiny: Tiny, rng: np.random.Generator) -> None:
    sizes = {"hidden": 256, "inner": 512, "head_dim": 64, "expert_inner": 256} if BLOCKS[kind][0] == 256 else {}
    tokens = rng.integers(0, 100, 90)
    found = [tiny.load(kind, architecture, {**sizes, "unpacked": unpacked}) for unpacked in (0, 1)]
    ours, expected = (feed(each, each.kv.alloc(), tokens) for each in found)
    assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.99


def test_layers_that_only_draft_are_left_out(tmp_path: Path, rng: np.random.Generator) -> None:
    """A published GLM-4.5 has one behind its last layer, in a GGUF file among its blocks."""
    model = saved("glm4_moe", tmp_path)
    tokens = rng.integers(0, 120, 40)
    expected = reference(model, tokens)
    draft = np.ones((64, 128), np.float32)
    write(tmp_path / "draft.safetensors", {"model.layers.3.eh_proj.weight": draft})
    (tmp_path / "model.safetensors").rename(tmp_path / "main.safetensors")  # so that both count
    path = export(model, "glm4moe", tmp_path / "m.gguf", extra="blk.3.nextn.enorm.weight")
    file = GGUFFile.open(path)
    file.metadata |= {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    for at in (tmp_path, file):
        ours = load_native(at, dtype="float32", kv_dtype="float32")
        assert np.abs(feed(ours, ours.kv.alloc(), tokens) - expected).max() < 2e-3 * np.abs(expected).max()
    with pytest.raises(ModelError, match="nextn"):
        load_native(path)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_old_files_of_latent_attention(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """What makes keys and values of latent vectors is one tensor; sizes of heads stand under other names."""
    model = saved("deepseek_v3", tmp_path)
    new = load_native(export(model, "deepseek2", tmp_path / "new.gguf"), kv_dtype="float32")
    file = GGUFFile.open(export(model, "deepseek2", tmp_path / "old.gguf", joined=kind))
    for key, size in {"key": 40, "value": 32}.items():
        del file.metadata[f"deepseek2.attention.{key}_length_mla"]
        file.metadata[f"deepseek2.attention.{key}_length"] = size
    file.metadata["deepseek2.attention.head_count_kv"] = 4
    old, tokens = load_native(file, kv_dtype="float32"), rng.integers(0, 120, 90)
    ours, expected = (feed(each, each.kv.alloc(), tokens) for each in (old, new))
    if kind == "F32":
        assert np.array_equal(ours, expected)
    else:
        assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.995
    assert old.info.kv_bytes_per_position == new.info.kv_bytes_per_position == 4 * 3 * (32 + 16 + 32)


def test_ties_of_groups_and_experts_go_to_the_lower_one(tmp_path: Path, rng: np.random.Generator) -> None:
    """Where all scores are equal, as where they are so and the choice is told to prefer the first experts."""
    saved("deepseek_v3", tmp_path)
    tensors, found = load_file(tmp_path / "model.safetensors"), []
    tokens = rng.integers(0, 120, 40)
    for preferred in ([0.0] * 8, [3e-3, 2e-3, 1e-3, *[0.0] * 5], [0.0, 0.0, *[1e-3] * 3, 0.0, 0.0, 0.0]):
        for name in tensors:
            if name.endswith("mlp.gate.weight"):
                tensors[name] = torch.zeros_like(tensors[name])
            elif name.endswith("e_score_correction_bias"):
                tensors[name] = torch.tensor(preferred)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        model = load_native(tmp_path, dtype="float32", kv_dtype="float32")
        found.append(feed(model, model.kv.alloc(), tokens))
        model.close()
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_damaged_experts_are_refused_by_name(tmp_path: Path, tiny: Tiny) -> None:
    path = tmp_path / "m.gguf"
    for changes, message in (
        ({"expert_count": 5}, r"ffn_gate_exps.weight is \[6, 96, 64\]"),
        ({"expert_used_count": 7}, "expert_used_count is 7, not a whole number from 1 to 6"),
        ({"expert_feed_forward_length": 64}, "expert_feed_forward_length is 64, and its tensors say 96"),
        ({"expert_weights_norm": True}, "expert_weights_norm is True"),
        ({"expert_gating_func": 2}, "expert_gating_func is 2"),
    ):
        file = GGUFFile.open(tiny.path("F32", "qwen2moe"))
        file.metadata |= {f"qwen2moe.{key}": value for key, value in changes.items()}
        with pytest.raises(ModelError, match=message):
            load_native(file)
    model = saved("qwen3_moe", tmp_path)
    for leave_out in ("blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight"):
        export(model, "qwen3moe", path, leave_out=leave_out)
        with pytest.raises(ModelError, match=r"blk\.1\.ffn_up_exps|other layers have a router"):
            load_native(path)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folder_in_sixteen_bits(
    name: str, dtype: torch.dtype, isa: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    theirs = saved(name, tmp_path, dtype)
    ours = load_native(tmp_path, isa=isa)
    tokens = rng.integers(0, 120, 100)
    row = ours.kv.alloc()
    got, expected = feed(ours, row, tokens), reference(theirs, tokens)
    assert ours.info.dtype == str(dtype).removeprefix("torch.")
    assert (got.argmax(-1) == expected.argmax(-1)).mean() > 0.9
    assert np.abs(got - expected).mean() < 0.02 * np.abs(expected).mean() + 0.02 * expected.std()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_on_loading(quantize: str, tmp_path: Path, rng: np.random.Generator) -> None:
    theirs = saved("llama", tmp_path)
    ours = load_native(tmp_path, quantize=quantize)
    assert ours.info.dtype == quantize
    tokens = rng.integers(0, 120, 100)
    row = ours.kv.alloc()
    got, expected = feed(ours, row, tokens), reference(theirs, tokens)
    correlation = np.corrcoef(got.ravel(), expected.ravel())[0, 1]
    assert correlation > {"int8": 0.99, "int4": 0.8}[quantize]  # random weights forgive little


VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
WRAPPERS: dict[str, dict[str, Any]] = {
    "Gemma3": {"text_config": COMMON | {"head_dim": 16, "sliding_window": 12}, "vision_config": VISION},
    "Gemma4": {"text_config": COMMON | GEMMA4 | {"pad_token_id": 0}, "vision_config": VISION | {"head_dim": 16}},
    "Mistral3": {
        "text_config": COMMON | {"model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN | {
            "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4,
        }},
        "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
    },
    "Qwen3VL": {
        "text_config": COMMON | {"head_dim": 16, "rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]},
    },
    "Qwen2_5_VL": {"text_config": COMMON | {"rope_parameters": MROPE}, "vision_config": QWEN_VISION},
    "Llava": {
        "text_config": COMMON | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_of_a_model_that_reads_images(
    name: str, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**WRAPPERS[name])
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
    theirs.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(120)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(tmp_path)
    tokens = rng.integers(3, 120, 60)
    expected = reference(theirs, tokens)
    for options in (
        LoadOptions(backend="native", dtype="float32", kv_dtype="float32"),
        LoadOptions(backend="transformers", dtype="float32", device="cpu"),
    ):
        ours, _ = load(tmp_path, options)
        assert np.abs(feed(ours, ours.kv.alloc(), tokens) - expected).max() < 2e-3 * np.abs(expected).max()
        ours.close()
    assert "reads images, which are not decoded here: its part for text is served" in caplog.text
    assert "UNEXPECTED" not in caplog.text


ARCHITECTURES = {
    "Mistral": "llama",
    "Ministral3": "mistral3",
    "SeedOss": "seed_oss",
    "Olmo3": "olmo2",
    "Mixtral": "llama",
    "GraniteMoe": "granitemoe",
    "GptOss": "gpt-oss",
    "DeepseekV2": "deepseek2",
    "DeepseekV3": "deepseek2",
    "Glm4MoeLite": "deepseek2",
    "Glm4Moe": "glm4moe",
    "Ernie4_5_Moe": "ernie4_5-moe",
    "Qwen3_5": "qwen35",
    "Lfm2Moe": "lfm2moe",
    "Qwen3Next": "qwen3next",
    "Qwen3_5Moe": "qwen35moe",
    "GraniteMoeHybrid": "granitehybrid",
    "NemotronH": "nemotron_h",
    "FalconH1": "falcon-h1",
}  # general.architecture, where it is not the family's name


# Of some the format cannot say what they have; granite4's files are granite's.
FOLDERS_ALONE = (
    "mistral-window",
    "ministral",
    "granite4",
    "mixtral-window",
    "qwen2_moe-layers",
    "qwen3_5-odd",
    "qwen3_next-layers",
    "lfm2_moe-plain",
    "nemotron_h-layers",
    "deepseek_v3-plain",
)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in FOLDERS_ALONE])
def test_gguf_is_the_folder(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Bit for bit: a converter's names, order of rows and metadata describe the same model."""
    family, extra = FAMILIES[name]
    same = {"query_pre_attn_scalar": 32} if family in ("Gemma2", "Gemma3") else {}  # the format does not say it
    model = saved(name, tmp_path, **same)
    frequencies = None
    if extra.get("rope_parameters") == LLAMA3:
        plain = rope.inverse_frequencies(1e4, 16)
        frequencies = plain / from_folder(tmp_path, "is refused").ropes[0].frequencies
    architecture = "nemotron_h_moe" if name == "nemotron_h-experts" else ARCHITECTURES.get(family, family.lower())
    path = export(model, architecture, tmp_path / "m.gguf", frequencies=frequencies)
    tokens = rng.integers(0, 120, 150)
    found = [load_native(at, dtype="float32", kv_dtype="float32") for at in (tmp_path, path)]
    folder, gguf = (feed(each, each.kv.alloc(), tokens) for each in found)
    if frequencies is not None or name in (
        "qwen3_5",
        "qwen3_5_moe",
        "falcon_h1",  # whose weights have been multiplied
    ):  # whose heads stand in another order, in which they are summed
        assert np.abs(folder - gguf).max() < 1e-4 * np.abs(folder).max()
    else:
        assert np.array_equal(folder, gguf)
    assert found[0].info.max_length == found[1].info.max_length == (200 if name == "phi3-long" else 512)


GGUF_CASES = [
    ("llama", "F32"), ("llama", "Q4_1"), ("llama", "F16"), ("llama", "Q5_0"), ("qwen2", "Q8_0"), ("qwen3", "Q4_0"),
    ("gemma3", "F32"), ("gemma3", "Q8_0"), ("llama", "BF16"), ("qwen3", "Q5_1"),
    ("llama", "IQ4_NL"), ("olmo2", "F32"), ("olmo2", "Q8_0"), ("phi3", "F16"), ("phi3", "Q4_0"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "kind"), GGUF_CASES)
def test_gguf_against_transformers_on_the_same_values(
    architecture: str, kind: str, tiny: Tiny, rng: np.random.Generator
) -> None:
    from outpace.models.torch import gguf as gguf_transformers

    sizes = {"layers": 7, "window": 12} if architecture in ("gemma3", "phi3") else {}
    path = tiny.path(kind, architecture, **sizes)
    theirs = gguf_transformers.build(GGUFFile.open(path), torch.float32, torch.device("cpu"))
    ours = load_native(path, kv_dtype="float32")
    tokens = rng.integers(0, 100, 120)
    expected = reference(theirs, tokens)
    row = ours.kv.alloc()
    got = feed(ours, row, tokens)
    if kind in ("F32", "F16"):
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    else:  # activations in 8 bits, or bfloat16
        assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.995


def test_k_quants_run(tiny: Tiny, rng: np.random.Generator) -> None:
    from outpace.models.torch import gguf as gguf_transformers

    for kind in ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S", "IQ4_XS", "TQ2_0", "MXFP4"):
        path = tiny.path(kind, "llama", hidden=256, inner=512, head_dim=64)
        theirs = gguf_transformers.build(GGUFFile.open(path), torch.float32, torch.device("cpu"))
        ours = load_native(path)
        tokens = rng.integers(0, 100, 60)
        row = ours.kv.alloc()
        expected = reference(theirs, tokens)
        assert np.corrcoef(feed(ours, row, tokens).ravel(), expected.ravel())[0, 1] > 0.995


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, tiny: Tiny) -> None:
    import json

    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"mlp_bias": True}, "biases"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_attention_heads": 3}, "must be|do not fit"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 4}, "has no tensor"),
        ({"quantization_config": {}}, "quantised"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=message):
            load_native(tmp_path)
    path = tiny.path()
    for options in ({"kv_dtype": "int2"}, {"quantize": "int3"}, {"threads": 0}, {"isa": "sse9"}, {"dtype": "int8"}):
        with pytest.raises(ParameterError):
            load_native(path, **options)  # type: ignore[arg-type]


def test_a_tensor_that_nothing_reads_is_refused_by_name(tiny: Tiny) -> None:
    """A bias that was left out would make another model of it."""
    with pytest.raises(ModelError, match=r"the tensor 'blk\.0\.ffn_down\.bias' and 1 more"):
        tiny.load("Q4_1", "llama", {"ffn_bias": 1})


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (architecture, kind)
        for architecture in ("llama", "qwen2moe", "gemma4")
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "F16", "F32")
    ]
    + [("deepseek2", "Q8_0"), ("deepseek2", "F16")],
)
def test_estimate(architecture: str, kind: str, tiny: Tiny) -> None:
    sizes = {"hidden": 256, "inner": 256, "head_dim": 64, "expert_inner": 256} if BLOCKS[kind][0] == 256 else {}
    if kind == "Q5_1" and architecture == "llama":
        sizes = {"head_dim": 24}  # heads are padded to 16
    for options in ({"kv_dtype": "float32"}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"quantize": "int8"}):
        model = tiny.load(kind, architecture, sizes, **options)
        info = model.info
        assert estimate(tiny.path(kind, architecture, **sizes), **options) == (
            info.weight_bytes,
            info.kv_bytes_per_position,
        )
        assert model.kv.bytes_for(64) == 64 * info.kv_bytes_per_position
        assert model.kv.bytes_for(64) == 64 * info.kv_bytes_per_position
        model.close()


def test_keys_that_nobody_reads_are_left_out(tmp_path: Path, rng: np.random.Generator) -> None:
    """Published folders, and files made of them, have matrices of layers that read another one's keys and values."""
    model, tokens = saved("gemma4-inputs", tmp_path), rng.integers(0, 120, 30)
    expected = reference(model, tokens)
    at = "model.layers.4.self_attn."
    idle = {f"{at}{part}_proj.weight": np.ones((32, 64), np.float32) for part in "kv"}
    write(tmp_path / "more.safetensors", {**idle, f"{at}k_norm.weight": np.ones(16, np.float32)})
    (tmp_path / "model.safetensors").rename(tmp_path / "main.safetensors")  # so that both count
    path = export(model, "gemma4", tmp_path / "m.gguf", extra="blk.4.attn_k.weight")
    for each in (tmp_path, path):
        ours = load_native(each, dtype="float32", kv_dtype="float32")
        assert np.abs(feed(ours, ours.kv.alloc(), tokens) - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-inputs"])
def test_layers_that_share_keys_store_none(name: str, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path)
    with torch.inference_mode():
        layers = theirs(torch.arange(5)[None], use_cache=True).past_key_values.layers
    parts = [part for layer in layers for part in (layer.keys, layer.values) if part is not None]
    numbers = sum(part.numel() for part in parts) // 5
    _, per_position = estimate(tmp_path, dtype="float32", kv_dtype="float32")
    ours = load_native(tmp_path, dtype="float32", kv_dtype="float32")
    assert per_position == ours.info.kv_bytes_per_position == ours.kv.bytes_for(64) // 64 == 4 * numbers
