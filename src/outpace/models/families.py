"""Every decoder architecture that is read here, as data. Both backends and training take what they need of it.

A new one is a ``Family`` in ``FAMILIES`` and a test; ``decoder`` turns it and a model's own numbers into a ``Decoder``,
``weights.tensors`` finds the tensors. The base is Llama: RMSNorm before both branches, SwiGLU, rotation of half against
half over the whole head, scores scaled by head_dim^-0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Names = Mapping[str, tuple[str, str]]  # a part -> GGUF's name, Hugging Face's

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm", "q_norm", "k_norm")  # of a layer, as it has them
BIASES = ("q", "k", "v", "o")  # of a layer, where the files have them
OUTER: Names = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
SPELLINGS = ("blk.{}.{}", "model.layers.{}.{}")  # of a part of a layer: GGUF's, Hugging Face's

# The numbers of a description: our name -> GGUF's key behind the architecture's, config.json's.
KEYS: Names = {
    "hidden": ("embedding_length", "hidden_size"),
    "inner": ("feed_forward_length", "intermediate_size"),
    "layers": ("block_count", "num_hidden_layers"),
    "heads": ("attention.head_count", "num_attention_heads"),
    "kv_heads": ("attention.head_count_kv", "num_key_value_heads"),
    "head_dim": ("attention.key_length", "head_dim"),
    "eps": ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    "max_length": ("context_length", "max_position_embeddings"),
    "window": ("attention.sliding_window", "sliding_window"),
    "full_every": ("attention.sliding_window_pattern", "sliding_window_pattern"),
    "attention_scale": ("attention.scale", "attention_multiplier"),
    "embedding_scale": ("embedding_scale", "embedding_multiplier"),
    "residual_scale": ("residual_scale", "residual_multiplier"),
    "logit_divisor": ("logit_scale", "logits_scaling"),
}

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


@dataclass(frozen=True, slots=True)
class RopeSource:
    """A table of rotations and where its base stands. ``layers``: whose table, as ``layer_types`` calls them."""

    base: float  # where the files do not say
    gguf: str = "rope.freq_base"
    config: str = "rope_theta"
    layers: str = "full_attention"


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers see a window where the files give its size. ``full_every``: every so-many-th sees all; 0: none does.

    ``flag``: a key of config.json without which there are none, and GGUF files of the family have none.
    """

    full_every: int = 0
    flag: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture. ``layer``: a layer's tensors by part, norms where it has them.

    Parts of one name are one fused tensor, its rows in the order of ``MATRICES``.
    """

    name: str
    model: str  # the class in Hugging Face's files
    transformers: str  # model_type
    layer: Names
    gguf: str | None = None  # general.architecture; None: its GGUF files name another family
    ropes: tuple[RopeSource, ...] = (RopeSource(1e4),)  # of layers that see all, and of windowed ones where they differ
    windows: Windows | None = None
    unrotated_every: int = 0  # each so many layers one has no rotation
    norm_offset: float = 0.0  # what safetensors leave out of norm weights; GGUF files have it added
    norms_over_heads: bool = False  # norms of queries and keys run over all heads at once
    interleaved: bool = False  # GGUF stores rows of queries and keys as 0 d/2 1 d/2+1 ... of each head
    activation: str = "silu"  # or "gelu_tanh"
    activation_key: str = "hidden_act"
    width_scales_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)
    query_scalar: bool = False  # config.json has query_pre_attn_scalar^-0.5 for head_dim^-0.5
    wide_scalar_layers: int = 0  # a GGUF file of so many layers has (hidden / heads)^-0.5 for it
    tied: bool = False  # where config.json does not say
    head_dim: int | None = None  # likewise; None: hidden / heads
    brings_code: bool = False  # published folders name Python files, which transformers has since made its own


FAMILIES = (
    Family("llama", "LlamaForCausalLM", "llama", {**_LAYER, **_NORMS_BEFORE}, "llama", interleaved=True),
    Family("mistral", "MistralForCausalLM", "mistral", {**_LAYER, **_NORMS_BEFORE}, windows=Windows()),
    Family(
        "qwen2", "Qwen2ForCausalLM", "qwen2", {**_LAYER, **_NORMS_BEFORE}, "qwen2",
        windows=Windows(flag="use_sliding_window"),
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", "qwen3", {**_LAYER, **_NORMS_BEFORE, **_QK_NORMS}, "qwen3",
        windows=Windows(flag="use_sliding_window"),
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
        width_scales_embedding=True, query_scalar=True, wide_scalar_layers=62, tied=True, head_dim=256,
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", "olmo2", {**_LAYER, **_NORMS_AFTER, **_QK_NORMS}, "olmo2", norms_over_heads=True,
        windows=Windows(full_every=4),
    ),
    Family(
        "phi3", "Phi3ForCausalLM", "phi3",
        {
            **_LAYER, **_NORMS_BEFORE,
            **dict.fromkeys(("q", "k", "v"), ("attn_qkv", "self_attn.qkv_proj")),
            **dict.fromkeys(("gate", "up"), ("ffn_up", "mlp.gate_up_proj")),
        },
        "phi3", windows=Windows(), brings_code=True,
    ),
    Family("granite", "GraniteForCausalLM", "granite", {**_LAYER, **_NORMS_BEFORE}, "granite", interleaved=True),
    Family(
        "smollm3", "SmolLM3ForCausalLM", "smollm3", {**_LAYER, **_NORMS_BEFORE}, "smollm3", interleaved=True,
        ropes=(RopeSource(2e6),), windows=Windows(flag="use_sliding_window"), unrotated_every=4, tied=True,
    ),
)  # fmt: skip


def of_gguf(architecture: str) -> Family | None:
    """The family of GGUF files of this architecture."""
    return next((family for family in FAMILIES if family.gguf == architecture), None)


def of_class(name: str) -> Family | None:
    """The family of Hugging Face's class ``name``."""
    return next((family for family in FAMILIES if family.model == name), None)
