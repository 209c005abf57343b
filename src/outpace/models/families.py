"""Every decoder architecture that is read here, a row of a table. Both backends and training take what they need of it.

A new one is a ``Family`` in ``FAMILIES`` and a test; ``decoder`` turns it and a model's own numbers into a ``Decoder``,
``weights.tensors`` finds the tensors. Long because it is one table, a row a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from outpace.models.architecture import (
    OUTER,
    SCALES,
    DeltaNet,
    Family,
    Heads,
    Latent,
    Mixture,
    Names,
    RopeSource,
    ShortConv,
    StateSpace,
    Windows,
)

_LAYER: Names = {
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
}
_NORMS_BEFORE: Names = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
}
_NORMS_AFTER: Names = {
    "post_attn_norm": ("post_attention_norm", "post_attention_layernorm"),
    "post_ffn_norm": ("post_ffw_norm", "post_feedforward_layernorm"),
}
_QK_NORMS: Names = {"q_norm": ("attn_q_norm", "self_attn.q_norm"), "k_norm": ("attn_k_norm", "self_attn.k_norm")}


_SHARED: Names = {
    "gate": ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    "up": ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    "down": ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
}


# Qwen's: one tensor of each, whatever the layer.
_QWEN_HEADS = Heads(
    join=(("nextn.eh_proj.weight",), ("mtp.fc.weight",)),
    embed_norm=(("nextn.enorm.weight",), ("mtp.pre_fc_norm_embedding.weight",)),
    features_norm=(("nextn.hnorm.weight",), ("mtp.pre_fc_norm_hidden.weight",)),
    norm=(("nextn.shared_head_norm.weight",), ("mtp.norm.weight",)),
    layer="mtp.layers.{}.{}",
)


# Tensors of tokens' inputs for each layer, beside a layer's and outside of them.
_INPUTS: Names = {
    "input_gate": ("inp_gate", "per_layer_input_gate"),
    "input_project": ("proj", "per_layer_projection"),
    "input_norm": ("post_norm", "post_per_layer_input_norm"),
}
_INPUTS_OUTER: Names = {
    "inputs_table": ("per_layer_token_embd", "model.embed_tokens_per_layer"),
    "inputs_project": ("per_layer_model_proj", "model.per_layer_model_projection"),
    "inputs_norm": ("per_layer_proj_norm", "model.per_layer_projection_norm"),
}

_LATENT: Names = {
    "q": ("attn_q_b", "self_attn.q_b_proj"), "k": ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    "q_norm": ("attn_q_a_norm", "self_attn.q_a_layernorm"), "k_norm": ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    **{part: _LAYER[part] for part in ("o", "gate", "up", "down")},
}  # fmt: skip

_LFM2: Names = {
    "q": ("attn_q", "self_attn.q_proj"), "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"), "o": ("attn_output", "self_attn.out_proj"),
    "gate": ("ffn_gate", "feed_forward.w1"), "up": ("ffn_up", "feed_forward.w3"),
    "down": ("ffn_down", "feed_forward.w2"),
    "attn_norm": ("attn_norm", "operator_norm"), "ffn_norm": ("ffn_norm", "ffn_norm"),
    "q_norm": ("attn_q_norm", "self_attn.q_layernorm"), "k_norm": ("attn_k_norm", "self_attn.k_layernorm"),
}  # fmt: skip
_LFM2_OUTER: Names = {**OUTER, "final_norm": ("token_embd_norm", "model.embedding_norm")}

_GRANITE_EXPERTS = Mixture(
    router=(
        ("ffn_gate_inp.weight",), ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
    experts={
        part: ((f"ffn_{part}_exps.weight",), (f"block_sparse_moe.{a}", f"block_sparse_moe.experts.{b}"))
        for part, a, b in (
            ("gate", "input_linear.weight", "gate_up_proj"), ("up", "input_linear.weight", "gate_up_proj"),
            ("down", "output_linear.weight", "down_proj"),
        )
    },
    count="num_local_experts", inner="intermediate_size", score="of_chosen",
)  # fmt: skip

FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", "llama", {**_LAYER, **_NORMS_BEFORE}, "llama", interleaved=True, mixed="mixtral",
        refuses=("mlp_bias",), absent={"max_position_embeddings": 2048},
    ),
    Family(
        "mistral", "MistralForCausalLM", "mistral", {**_LAYER, **_NORMS_BEFORE}, windows=Windows(every=True), biases=(),
        absent={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM", "qwen2", {**_LAYER, **_NORMS_BEFORE}, "qwen2",
        windows=Windows(flag="use_sliding_window", first="max_window_layers"), biases=("q", "k", "v"), bias_flag=None,
        absent={
            "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
            "max_position_embeddings": 32768,
        },
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", "qwen3", {**_LAYER, **_NORMS_BEFORE, **_QK_NORMS}, "qwen3",
        windows=Windows(flag="use_sliding_window", first="max_window_layers"),
        absent={
            "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28,
            "max_position_embeddings": 32768,
        },
    ),
    Family(
        "qwen3_5", "Qwen3_5ForCausalLM", "qwen3_5_text",
        {
            **_LAYER, **_NORMS_BEFORE, **_QK_NORMS, "ffn_norm": ("post_attention_norm", "post_attention_layernorm"),
        },
        "qwen35", delta=DeltaNet(), gated=True, norm_offset=1.0, rotates_part=True,
        heads_beyond="mtp_num_hidden_layers", heads=_QWEN_HEADS, drafts=("mtp.",),
        absent={
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "mtp_num_hidden_layers": 0,
        },
    ),
    Family(
        "qwen3_5_moe", "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text",
        {
            **_LAYER, **_NORMS_BEFORE, **_QK_NORMS, "ffn_norm": ("post_attention_norm", "post_attention_layernorm"),
        },
        "qwen35moe", delta=DeltaNet(), gated=True, norm_offset=1.0, rotates_part=True,
        heads_beyond="mtp_num_hidden_layers", heads=_QWEN_HEADS, drafts=("mtp.",),
        mixture=Mixture(
            shared={part: (ours, f"mlp.shared_expert.{part}_proj") for part, (ours, _) in _SHARED.items()},
            shared_gate=(("ffn_gate_inp_shexp.weight",), ("mlp.shared_expert_gate.weight",)),
            shared_inner="shared_expert_intermediate_size",
        ),
        absent={
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "mtp_num_hidden_layers": 0, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts": 256, "num_experts_per_tok": 8,
        },
        aliases={"num_local_experts": "num_experts"}, keys={"inner": "moe_intermediate_size"},
    ),
    Family(
        "qwen3_next", "Qwen3NextForCausalLM", "qwen3_next",
        {
            **_LAYER, **_NORMS_BEFORE, **_QK_NORMS, "ffn_norm": ("post_attention_norm", "post_attention_layernorm"),
        },
        "qwen3next",
        delta=DeltaNet(
            matrices={
                "qkv": ("attn_qkv", "linear_attn.in_proj_qkvz"), "z": ("attn_gate", "linear_attn.in_proj_qkvz"),
                "b": ("ssm_ba", "linear_attn.in_proj_ba"), "a": ("ssm_ba", "linear_attn.in_proj_ba"),
                "o": ("ssm_out", "linear_attn.out_proj"),
            },
            tiled=False,
        ),
        gated=True, norm_offset=1.0, rotates_part=True, heads_beyond="mtp_num_hidden_layers", heads=_QWEN_HEADS,
        drafts=("mtp.",),
        mixture=Mixture(
            shared={part: (ours, f"mlp.shared_expert.{part}_proj") for part, (ours, _) in _SHARED.items()},
            shared_gate=(("ffn_gate_inp_shexp.weight",), ("mlp.shared_expert_gate.weight",)),
            shared_inner="shared_expert_intermediate_size", renormalise_key="norm_topk_prob",
            step="decoder_sparse_step", dense="mlp_only_layers",
        ),
        absent={
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
            "num_experts_per_tok": 10, "norm_topk_prob": True, "intermediate_size": 5632,
            "mtp_num_hidden_layers": 1,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "lfm2_moe", "Lfm2MoeForCausalLM", "lfm2_moe", _LFM2, "lfm2moe", conv=ShortConv(), ropes=(RopeSource(1e6),),
        biases=(), refuses=("conv_bias",), activation_key=None, outer=_LFM2_OUTER,
        mixture=Mixture(
            router=(("ffn_gate_inp.weight",), ("feed_forward.gate.weight",)),
            experts={
                part: (
                    (f"ffn_{part}_exps.weight",),
                    (f"feed_forward.experts.{{}}.{theirs}.weight", f"feed_forward.experts.{joined}"),
                )
                for part, theirs, joined in (
                    ("gate", "w1", "gate_up_proj"), ("up", "w3", "gate_up_proj"), ("down", "w2", "down_proj"),
                )
            },
            choice_bias=(("exp_probs_b.bias",), ("feed_forward.expert_bias",)), choice_flag="use_expert_bias",
            score="sigmoid",
            renormalise_key="norm_topk_prob", least_total=1e-6, scale="routed_scaling_factor", first="num_dense_layers",
        ),
        absent={
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "max_position_embeddings": 128000, "conv_L_cache": 3, "intermediate_size": 7168,
            "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "use_expert_bias": True,
        },
        aliases={
            "norm_eps": "rms_norm_eps", "num_local_experts": "num_experts", "tie_embedding": "tie_word_embeddings",
        },
    ),
    Family(
        "lfm2", "Lfm2ForCausalLM", "lfm2", _LFM2,
        "lfm2", conv=ShortConv(), ropes=(RopeSource(1e6),), biases=(), refuses=("conv_bias",), activation_key=None,
        adjusts_inner=True, outer=_LFM2_OUTER,
        absent={
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "max_position_embeddings": 128000, "conv_L_cache": 3, "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
        },
        aliases={
            "norm_eps": "rms_norm_eps", "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings",
        },
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", "gemma2",
        {
            **_LAYER, **_NORMS_AFTER,
            "attn_norm": ("attn_norm", "input_layernorm"), "ffn_norm": ("ffn_norm", "pre_feedforward_layernorm"),
        },
        "gemma2", windows=Windows(full_every=2, full_every_key=False, gguf_size=4096), norm_offset=1.0,
        activation="gelu_tanh", activation_key="hidden_activation", width_scales_embedding=True, query_scalar=True,
        wide_scalar_layers=46, caps={"score_cap": 50.0, "logit_cap": 30.0}, modules=True,
        absent={
            "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        "gemma3", "Gemma3ForCausalLM", "gemma3_text",
        {
            **_LAYER, **_NORMS_AFTER, **_QK_NORMS,
            "attn_norm": ("attn_norm", "input_layernorm"), "ffn_norm": ("ffn_norm", "pre_feedforward_layernorm"),
        },
        "gemma3",
        ropes=(
            RopeSource(1e6), RopeSource(1e4, "rope.freq_base_swa", "rope_local_base_freq", "sliding_attention"),
        ),
        windows=Windows(full_every=6), norm_offset=1.0, activation="gelu_tanh", activation_key="hidden_activation",
        width_scales_embedding=True, query_scalar=True, wide_scalar_layers=62,
        refuses=("final_logit_softcapping", "use_bidirectional_attention"),
        absent={
            "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
    ),
    Family(
        "gemma4", "Gemma4ForCausalLM", "gemma4_text",
        {
            **_LAYER, **_NORMS_AFTER, **_QK_NORMS, **_INPUTS,
            "attn_norm": ("attn_norm", "input_layernorm"), "ffn_norm": ("ffn_norm", "pre_feedforward_layernorm"),
        },
        "gemma4",
        ropes=(RopeSource(1e6), RopeSource(1e4, "rope.freq_base_swa", layers="sliding_attention")),
        windows=Windows(full_every=6, full_every_key=False, last_full=True), activation="gelu_tanh",
        activation_key="hidden_activation", width_scales_embedding=True, unit_scale=True, varied=True, value_norm=True,
        output_scale=(("layer_output_scale.weight",), ("layer_scalar",)), caps={"logit_cap": 0.0}, modules=True,
        inputs="hidden_size_per_layer_input", outer={**OUTER, **_INPUTS_OUTER},
        mixture=Mixture(
            router=(("ffn_gate_inp.weight",), ("router.proj.weight",)),
            experts={
                "gate": (("ffn_gate_up_exps.weight", "ffn_gate_exps.weight"), ("experts.gate_up_proj",)),
                "up": (("ffn_gate_up_exps.weight", "ffn_up_exps.weight"), ("experts.gate_up_proj",)),
                "down": (("ffn_down_exps.weight",), ("experts.down_proj",)),
            },
            shared={part: _LAYER[part] for part in ("gate", "up", "down")}, flag="enable_moe_block",
            norms={
                "norm": (("pre_ffw_norm_2.weight",), ("pre_feedforward_layernorm_2.weight",)),
                "post_norm": (("post_ffw_norm_2.weight",), ("post_feedforward_layernorm_2.weight",)),
                "shared_post_norm": (("post_ffw_norm_1.weight",), ("post_feedforward_layernorm_1.weight",)),
            },
            router_scale=(("ffn_gate_inp.scale",), ("router.scale",)),
            expert_scale=(("ffn_down_exps.scale",), ("router.per_expert_scale",)), used="top_k_experts",
            shared_inner="intermediate_size",
        ),
        requires={"use_bidirectional_attention": (None, "vision")},
        absent={
            "tie_word_embeddings": True, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512,
            "hidden_activation": "gelu_pytorch_tanh", "num_attention_heads": 8, "num_key_value_heads": 4,
            "vocab_size": 262144, "max_position_embeddings": 131072, "vocab_size_per_layer_input": 262144,
            "hidden_size_per_layer_input": 256,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", "olmo2", {**_LAYER, **_NORMS_AFTER, **_QK_NORMS}, "olmo2", windowed="olmo3",
        norms_over_heads=True, absent={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    Family(
        "olmo3", "Olmo3ForCausalLM", "olmo3", {**_LAYER, **_NORMS_AFTER, **_QK_NORMS}, norms_over_heads=True,
        ropes=(RopeSource(5e5), RopeSource(5e5, layers="sliding_attention")), windows=Windows(full_every=4),
        absent={"rms_norm_eps": 1e-5, "sliding_window": 4096, "max_position_embeddings": 2048},
    ),
    Family(
        "phi3", "Phi3ForCausalLM", "phi3",
        {
            **_LAYER, **_NORMS_BEFORE,
            **dict.fromkeys(("q", "k", "v"), ("attn_qkv", "self_attn.qkv_proj")),
            **dict.fromkeys(("gate", "up"), ("ffn_up", "mlp.gate_up_proj")),
        },
        "phi3", rotates_part=True, windows=Windows(every=True), biases=(), brings_code=True,
        absent={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        },
    ),
    Family(
        "granite", "GraniteForCausalLM", "granite", {**_LAYER, **_NORMS_BEFORE}, "granite", interleaved=True,
        scales=SCALES, refuses=("mlp_bias",), absent={"attention_multiplier": 1.0, "max_position_embeddings": 2048},
    ),
    Family(
        "granite4", "GraniteMoeHybridForCausalLM", "granitemoehybrid",
        {
            **_LAYER, **_NORMS_BEFORE, "gate": ("ffn_gate", "shared_mlp.input_linear"),
            "up": ("ffn_up", "shared_mlp.input_linear"), "down": ("ffn_down", "shared_mlp.output_linear"),
        },
        "granitehybrid", interleaved=True, scales=SCALES, scan=StateSpace(),
        rotates_if=("position_embedding_type", "rope", "rope.scaling.finetuned"),
        mixture=replace(
            _GRANITE_EXPERTS,
            shared={
                "gate": ("ffn_gate_shexp", "shared_mlp.input_linear"),
                "up": ("ffn_up_shexp", "shared_mlp.input_linear"),
                "down": ("ffn_down_shexp", "shared_mlp.output_linear"),
            },
            optional=True, shared_inner="shared_intermediate_size",
        ),
        refuses=("mamba_proj_bias",), requires={"mamba_conv_bias": (True,)},
        keys={"inner": "shared_intermediate_size"},
        absent={
            "attention_multiplier": 1.0, "max_position_embeddings": 2048, "num_local_experts": 8,
            "num_experts_per_tok": 2, "intermediate_size": 11008, "shared_intermediate_size": 1024,
            "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        },
        aliases={"layers_block_type": "layer_types", "num_experts": "num_local_experts"},
    ),
    Family(
        "nemotron_h", "NemotronHForCausalLM", "nemotron_h",
        {
            **{part: (f"attn_{part}", f"mixer.{part}_proj") for part in ("q", "k", "v")},
            "o": ("attn_output", "mixer.o_proj"), "up": ("ffn_up", "mixer.up_proj"),
            "down": ("ffn_down", "mixer.down_proj"), **dict.fromkeys(("attn_norm", "ffn_norm"), ("attn_norm", "norm")),
        },
        "nemotron_h", "nemotron_h_moe", single=True, layers="backbone.layers.{}.{}", rotates=False,
        scan=StateSpace(
            into=("ssm_in", "mixer.in_proj"), o=("ssm_out", "mixer.out_proj"),
            convolution=(("ssm_conv1d.weight",), ("mixer.conv1d.weight",)),
            convolution_bias=(("ssm_conv1d.bias",), ("mixer.conv1d.bias",)),
            decay=(("ssm_a",), ("mixer.A_log",)), dt_bias=(("ssm_dt.bias",), ("mixer.dt_bias",)),
            skip=(("ssm_d",), ("mixer.D",)), norm=(("ssm_norm.weight",), ("mixer.norm.weight",)),
            heads="mamba_num_heads", head_dim="mamba_head_dim", groups="n_groups", state="ssm_state_size",
            taps="conv_kernel", expand=None,
        ),
        activation="relu2", activation_key="mlp_hidden_act", biases=(),
        outer={
            "embedding": ("token_embd", "backbone.embeddings"), "final_norm": ("output_norm", "backbone.norm_f"),
            "head": ("output", "lm_head"),
        },
        mixture=Mixture(
            router=(("ffn_gate_inp.weight",), ("mixer.gate.weight",)),
            experts={
                part: ((f"ffn_{part}_exps.weight",), (f"{at}.{{}}.{part}_proj.weight", f"{at}.{part}_proj"))
                for part, at in dict.fromkeys(("up", "down"), "mixer.experts").items()
            },
            shared={part: (f"ffn_{part}_shexp", f"mixer.shared_experts.{part}_proj") for part in ("up", "down")},
            choice_bias=(("exp_probs_b.bias",), ("mixer.gate.e_score_correction_bias",)),
            count="n_routed_experts", optional=True, shared_inner="moe_shared_expert_intermediate_size",
            score="sigmoid", renormalise_key="norm_topk_prob", renormalise_in_gguf=True, least_total=1e-20,
            scale="routed_scaling_factor",
        ),
        refuses=("mlp_bias", "use_bias", "moe_latent_size"),
        requires={"use_conv_bias": (True,), "mamba_hidden_act": ("silu",), "n_group": (1,), "topk_group": (1,)},
        brings_code=True,
        absent={
            "num_key_value_heads": 8, "num_attention_heads": 32, "head_dim": 128, "hidden_size": 4096,
            "intermediate_size": 21504, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
            "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "use_conv_bias": True, "mamba_num_heads": 128,
            "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "vocab_size": 131072,
        },
        aliases={
            "layer_norm_epsilon": "rms_norm_eps", "num_local_experts": "n_routed_experts",
            "layer_types": "layers_block_type", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
    ),
    Family(
        "falcon_h1", "FalconH1ForCausalLM", "falcon_h1",
        {
            **{part: _LAYER[part] for part in ("q", "k", "v", "o")},
            **{part: (f"ffn_{part}", f"feed_forward.{part}_proj") for part in ("gate", "up", "down")},
            "attn_norm": ("attn_norm", "input_layernorm"), "ffn_norm": ("ffn_norm", "pre_ff_layernorm"),
        },
        "falcon-h1", multiplied=True, bare=("ffn_norm",), biases=(),
        scan=StateSpace(
            inner="mamba_d_ssm", normed="mamba_rms_norm", norm_first="mamba_norm_before_gate", beside=True,
        ),
        outer={**OUTER, "final_norm": ("output_norm", "model.final_layernorm")},
        refuses=("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"),
        requires={"mamba_conv_bias": (True,)},
        absent={
            "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto",
            "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
            "mamba_norm_before_gate": True, "mamba_rms_norm": False,
        },
    ),
    Family(
        "seed_oss", "SeedOssForCausalLM", "seed_oss",
        {**_LAYER, **_NORMS_BEFORE, "ffn_norm": ("post_attention_norm", "post_attention_layernorm")}, "seed_oss",
        biases=("q", "k", "v"), refuses=("mlp_bias", "attention_out_bias"),
        absent={
            "attention_bias": True, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288,
        },
    ),
    Family(
        "ministral", "MinistralForCausalLM", "ministral", {**_LAYER, **_NORMS_BEFORE}, windows=Windows(), biases=(),
        absent={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    Family(
        "ministral3", "Ministral3ForCausalLM", "ministral3", {**_LAYER, **_NORMS_BEFORE}, "mistral3",
        windows=Windows(every=True), biases=(), interleaved=True, grows=True,
        absent={
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    Family(
        "smollm3", "SmolLM3ForCausalLM", "smollm3", {**_LAYER, **_NORMS_BEFORE}, "smollm3", interleaved=True,
        ropes=(RopeSource(2e6),), windows=Windows(flag="use_sliding_window", unrotated=True), unrotated_every=4,
        refuses=("mlp_bias",),
        absent={
            "tie_word_embeddings": True, "num_attention_heads": 16, "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
    ),
    Family(
        "mixtral", "MixtralForCausalLM", "mixtral", {**_LAYER, **_NORMS_BEFORE}, ropes=(RopeSource(1e6),),
        windows=Windows(every=True), biases=(), interleaved=True,
        mixture=Mixture(
            router=(("ffn_gate_inp.weight",), ("block_sparse_moe.gate.weight", "mlp.gate.weight")),
            experts={
                part: (
                    (f"ffn_{part}_exps.weight", f"ffn_{part}.{{}}.weight"),
                    (f"block_sparse_moe.experts.{{}}.{theirs}.weight", f"mlp.experts.{fused}"),
                )
                for part, theirs, fused in (
                    ("gate", "w1", "gate_up_proj"), ("up", "w3", "gate_up_proj"), ("down", "w2", "down_proj"),
                )
            },
            count="num_local_experts", inner="intermediate_size",
        ),
        absent={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_local_experts": 8,
            "num_experts_per_tok": 2, "intermediate_size": 14336,
        },
        aliases={"num_experts": "num_local_experts"},
    ),
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", "qwen2_moe", {**_LAYER, **_NORMS_BEFORE}, "qwen2moe",
        windows=Windows(flag="use_sliding_window", every_other_below="max_window_layers"), biases=("q", "k", "v"),
        bias_flag="qkv_bias",
        mixture=Mixture(
            shared={part: (ours, f"mlp.shared_expert.{part}_proj") for part, (ours, _) in _SHARED.items()},
            shared_gate=(("ffn_gate_inp_shexp.weight",), ("mlp.shared_expert_gate.weight",)),
            shared_inner="shared_expert_intermediate_size", renormalise_key="norm_topk_prob", gguf_renormalises=False,
            step="decoder_sparse_step", dense="mlp_only_layers",
        ),
        absent={
            "num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28, "qkv_bias": True,
            "max_position_embeddings": 32768, "intermediate_size": 5632, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
        },
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_moe", {**_LAYER, **_NORMS_BEFORE, **_QK_NORMS}, "qwen3moe",
        windows=Windows(every=True, flag="use_sliding_window"),
        mixture=Mixture(
            renormalise_key="norm_topk_prob", step="decoder_sparse_step", dense="mlp_only_layers",
        ),
        aliases={"num_local_experts": "num_experts"},
        absent={
            "num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 32768,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        },
    ),
    Family(
        "olmoe", "OlmoeForCausalLM", "olmoe", {**_LAYER, **_NORMS_BEFORE, **_QK_NORMS}, "olmoe",
        norms_over_heads=True, refuses=("clip_qkv",),
        mixture=Mixture(inner="intermediate_size", renormalise_key="norm_topk_prob", gguf_renormalises=False),
        absent={
            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "intermediate_size": 2048, "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "granite_moe", "GraniteMoeForCausalLM", "granitemoe", {**_LAYER, **_NORMS_BEFORE}, "granitemoe",
        interleaved=True, scales=SCALES,
        mixture=_GRANITE_EXPERTS,
        absent={
            "attention_multiplier": 1.0, "max_position_embeddings": 2048, "intermediate_size": 11008,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    Family(
        "glm4_moe", "Glm4MoeForCausalLM", "glm4_moe",
        {**_LAYER, **_NORMS_BEFORE, **_QK_NORMS, "ffn_norm": ("post_attention_norm", "post_attention_layernorm")},
        "glm4moe", rotates_part=True, biases=("q", "k", "v"), norms_flag="use_qk_norm",
        heads_beyond="num_nextn_predict_layers", heads=Heads(),
        mixture=Mixture(
            shared=_SHARED, choice_bias=(("exp_probs_b.bias",), ("mlp.gate.e_score_correction_bias",)),
            count="n_routed_experts", shared_count="n_shared_experts", score="sigmoid",
            renormalise_key="norm_topk_prob", renormalise_in_gguf=True, least_total=1e-20,
            scale="routed_scaling_factor", first="first_k_dense_replace",
        ),
        requires={"n_group": (1,), "topk_group": (1,)},
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        absent={
            "num_attention_heads": 96, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "max_position_embeddings": 131072, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", "deepseek_v2", {**_LATENT, **_NORMS_BEFORE}, latent=Latent(),
        biases=(), refuses=("attention_bias", "mlp_bias"), brings_code=True,
        mixture=Mixture(
            shared=_SHARED, count="n_routed_experts", shared_count="n_shared_experts", renormalise=False,
            gguf_renormalises=False, scale="routed_scaling_factor", first="first_k_dense_replace", groups="n_group",
            used_groups="topk_group", grouped=("topk_method", "group_limited_greedy"),
        ),
        requires={"topk_method": ("greedy", "group_limited_greedy")},
        aliases={"num_experts": "n_routed_experts"},
        absent={
            "num_attention_heads": 32, "max_position_embeddings": 2048, "intermediate_size": 11008,
            "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0, "topk_method": "greedy", "kv_lora_rank": 512, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", "deepseek_v3", {**_LATENT, **_NORMS_BEFORE}, "deepseek2",
        softmax="deepseek_v2", latent=Latent(neighbours_key="rope_interleave"), biases=(), refuses=("attention_bias",),
        heads_beyond="num_nextn_predict_layers", heads=Heads(), brings_code=True,
        mixture=Mixture(
            shared=_SHARED, choice_bias=(("exp_probs_b.bias",), ("mlp.gate.e_score_correction_bias",)),
            count="n_routed_experts", shared_count="n_shared_experts", score="sigmoid",
            renormalise_key="norm_topk_prob", renormalise_in_gguf=True, least_total=1e-20,
            scale="routed_scaling_factor", first="first_k_dense_replace", groups="n_group", used_groups="topk_group",
            best_two=True,
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        absent={
            "num_attention_heads": 128, "max_position_embeddings": 4096, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
            "norm_topk_prob": True, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True, "num_nextn_predict_layers": 1,
        },
    ),
    Family(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "glm4_moe_lite", {**_LATENT, **_NORMS_BEFORE},
        latent=Latent(neighbours_key="rope_interleave"), biases=(), refuses=("attention_bias",),
        heads_beyond="num_nextn_predict_layers", heads=Heads(),
        mixture=Mixture(
            shared=_SHARED, choice_bias=(("exp_probs_b.bias",), ("mlp.gate.e_score_correction_bias",)),
            count="n_routed_experts", shared_count="n_shared_experts", score="sigmoid",
            renormalise_key="norm_topk_prob", least_total=1e-20, scale="routed_scaling_factor",
            kinds="mlp_layer_types", groups="n_group", used_groups="topk_group", best_two=True,
        ),
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        absent={
            "num_attention_heads": 20, "max_position_embeddings": 202752, "intermediate_size": 10240,
            "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "kv_lora_rank": 512,
            "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
            "rope_interleave": True, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
        },
    ),
    Family(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {**_LAYER, **_NORMS_BEFORE}, "ernie4_5-moe",
        ropes=(RopeSource(5e5),), biases=(), interleaved=True, neighbours=True, refuses=("use_bias",),
        mixture=Mixture(
            shared=_SHARED,
            choice_bias=(
                ("exp_probs_b.bias",),
                ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"),
            ),
            count="moe_num_experts", used="moe_k", shared_count="moe_num_shared_experts", least_total=1e-12,
            least_total_key="moe_norm_min", first="moe_layer_start_index", last="moe_layer_end_index",
            step="moe_layer_interval",
        ),
        absent={
            "num_attention_heads": 20, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "max_position_embeddings": 131072, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_k": 6,
            "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
            "moe_layer_end_index": -1, "moe_layer_interval": 1,
        },
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM", "gpt_oss",
        {**_LAYER, **_NORMS_BEFORE, "ffn_norm": ("post_attention_norm", "post_attention_layernorm")}, "gpt-oss",
        ropes=(RopeSource(150000.0),), windows=Windows(full_every=2, full_every_key=False),
        activation="clamped_silu",
        sinks=(("attn_sinks.weight",), ("self_attn.sinks",)), yarn_truncates=False,
        requires={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        mixture=Mixture(
            router=(("ffn_gate_inp.weight",), ("mlp.router.weight",)),
            experts={
                part: ((f"ffn_{part}_exps.weight",), (f"mlp.experts.{theirs}", f"mlp.experts.{theirs}_blocks"))
                for part, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
            },
            biases={
                "router": (("ffn_gate_inp.bias",), ("mlp.router.bias",)),
                **{
                    part: ((f"ffn_{part}_exps.bias",), (f"mlp.experts.{theirs}_bias",))
                    for part, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
                },
            },
            woven=True, mxfp4=True, count="num_local_experts", inner="intermediate_size", score="of_chosen",
        ),
        absent={
            "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "sliding_window": 128, "attention_bias": True, "intermediate_size": 2880, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        aliases={"num_experts": "num_local_experts"},
    ),
)  # fmt: skip


# Models of images and text whose part for text is served alone: the class in Hugging Face's files -> the model_type of
# the family that its text is computed as; None: text_config says.
WRAPPERS: Mapping[str, str | None] = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "LlavaForConditionalGeneration": None,
    "LlavaNextForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
# Beginnings of their tensors' names: those of text with what stands for them in a model of text, and the others.
TEXT_TENSORS = (
    ("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
)  # fmt: skip
IMAGE_TENSORS = tuple(
    f"{prefix}{part}" for prefix in ("", "model.")
    for part in (
        "visual.", "vision_tower.", "multi_modal_projector.", "image_newline", "embed_vision.", "audio_tower.",
        "embed_audio.",
    )
)  # fmt: skip


def named_class(config: Mapping[str, Any]) -> Any:
    """The first class that a config.json names; None where it names none."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else None


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the config.json of a wrapper's text alone would be; None where it is none of ``WRAPPERS``, or its text is of
    no family here."""
    named = named_class(config)
    if named not in WRAPPERS:
        return None
    text = config.get("text_config") or {k: v for k, v in config.items() if k != "vision_config"}
    kind = WRAPPERS[named] or text.get("model_type")
    family = next((family for family in FAMILIES if family.transformers == kind), None)
    if family is None:
        return None
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    own = {**text, **tied, "architectures": [family.model], "model_type": family.transformers}
    for key in ("rope_scaling", "rope_parameters"):  # without images all of a position's parts are the same
        rope = own.get(key)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            own[key] = {**rope, "type": "default", "rope_type": "default"}
    return own


def text_name(name: str) -> str | None:
    """A wrapper's tensor as its text's model calls it; None: it is of images."""
    if name.startswith(IMAGE_TENSORS):
        return None
    return next((own + name.removeprefix(theirs) for theirs, own in TEXT_TENSORS if name.startswith(theirs)), name)


def of_gguf(architecture: str, windowed: bool = False, mixed: bool = False, softmax: bool = False) -> Family | None:
    """The family of GGUF files of this architecture. ``windowed``, ``mixed``, ``softmax``: of those with a window, with
    experts, with experts whose scores are no sigmoids."""
    family = next((family for family in FAMILIES if architecture in (family.gguf, family.gguf_mixed)), None)
    name = family and ((windowed and family.windowed) or (mixed and family.mixed) or (softmax and family.softmax))
    return next(other for other in FAMILIES if other.name == name) if name else family


def unmet(family: Family, get: Callable[[str], Any]) -> tuple[str, Any] | None:
    """A key that ``family`` requires to have another value than ``get`` gives, and that value."""
    for key, values in family.requires.items():
        there = get(key)
        for each in there if isinstance(there, list) else [there]:
            if each not in values:
                return key, each
    return None


def of_class(name: str) -> Family | None:
    """The family of Hugging Face's class ``name``."""
    return next((family for family in FAMILIES if family.model == name), None)
