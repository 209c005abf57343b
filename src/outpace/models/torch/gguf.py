"""A GGUF file as a transformers model: its configuration and weights, rebuilt from metadata and tensors.

The native backend's families are here; ``gguf_others`` has those that transformers can describe. Conventions of the
format that are undone: llama's q and k rows are stored in interleaved rotary order; Gemma's norm weights have 1 added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outpace.arrays import F32
from outpace.errors import ModelError
from outpace.models.formats.gguf import GGUFFile

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's dimensions, as every backend that reads GGUF needs them."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_base: float
    tied: bool


class Meta:
    """Metadata of the file's architecture, checked."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.prefix = gguf.architecture

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.gguf.path.name} cannot be loaded: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            raise self.fail(f"{self.prefix}.{key} is {_short(value)}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
            raise self.fail(f"{self.prefix}.{key} is {_short(value)}, not a positive number")
        return float(value)


def _short(value: Any) -> str:
    return "a list" if isinstance(value, (list, np.ndarray)) else repr(value)


def shape_of(gguf: GGUFFile) -> Shape:
    """The model's dimensions. Raises ModelError for other families, and for metadata that makes no sense."""
    meta = Meta(gguf)
    if gguf.architecture not in ARCHITECTURES:
        raise meta.fail(f"the architecture {gguf.architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    if meta.get("expert_count", 0):
        raise meta.fail("mixtures of experts are not supported from GGUF: use the original Hugging Face model")
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    embedding = gguf.info("token_embd.weight").shape
    head_dim = meta.integer("attention.key_length", max(1, hidden // heads))
    kv_heads = meta.integer("attention.head_count_kv", heads)
    if len(embedding) != 2 or embedding[1] != hidden or heads % kv_heads or head_dim % 2:
        raise meta.fail(
            f"{heads} heads, {kv_heads} KV heads of {head_dim} and embeddings {embedding} do not fit width {hidden}"
        )
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise meta.fail("its keys and values differ in width, which is not supported from GGUF")
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise meta.fail("it rotates only a part of each head, which is not supported from GGUF")
    return Shape(
        architecture=gguf.architecture,
        layers=meta.integer("block_count"),
        hidden=hidden,
        inner=meta.integer("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=embedding[0],
        context=meta.integer("context_length"),
        norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        rope_base=meta.number("rope.freq_base", 1e6 if gguf.architecture == "gemma3" else 1e4),
        tied="output.weight" not in gguf.tensors,
    )


def kv_numbers(gguf: GGUFFile) -> int:
    """Numbers that one position of keys and values takes. Raises ModelError for what ``build`` would not serve."""
    shape = shape_of(gguf)
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def build(gguf: GGUFFile, dtype: torch.dtype, device: torch.device) -> Any:
    """The PreTrainedModel in evaluation mode. Raises ModelError when the file is incomplete or not supported."""
    shape = shape_of(gguf)
    config, cls = _config(gguf, shape)
    weights = _weights(gguf, shape, dtype, device)
    with torch.device("meta"):
        model = cls(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shape.tied:
        expected.pop("lm_head.weight", None)
    for name, size in expected.items():
        if name not in weights:
            raise ModelError(f"{gguf.path.name} is incomplete: it has no tensor for {name}")
        if weights[name].shape != size:
            raise ModelError(f"{gguf.path.name}: {name} is {list(weights[name].shape)}, but must be {list(size)}")
    unknown = sorted(set(weights) - set(expected))
    if unknown:
        raise ModelError(f"{gguf.path.name} has tensors that a {shape.architecture} model does not use: {unknown[0]}")
    model.load_state_dict(weights, strict=False, assign=True)
    if shape.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    # What is computed from the configuration and not stored was made on the meta device too: make it anew.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)
    if shape.architecture == "gemma3":
        scale = torch.tensor(float(model.model.embed_tokens.scalar_embed_scale), device=device)
        model.model.embed_tokens.register_buffer("embed_scale", scale, persistent=False)
    if "rope_freqs.weight" in gguf.tensors:
        _slow_down(gguf, model.model.rotary_emb)
    left = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise ModelError(f"{gguf.path.name}: this version of transformers has a part that is not known here: {left[0]}")
    return model.eval()


def _slow_down(gguf: GGUFFile, rotary: Any) -> None:
    """Llama 3's stretched context: the file lists a divisor for each frequency."""
    divisors = torch.from_numpy(gguf.dequantize("rope_freqs.weight")).to(rotary.inv_freq.device)
    if divisors.shape != rotary.inv_freq.shape or not bool((divisors > 0).all()):
        raise ModelError(
            f"{gguf.path.name}: rope_freqs.weight does not fit the model's {len(rotary.inv_freq)} frequencies"
        )
    rotary.inv_freq = rotary.inv_freq / divisors


def _config(gguf: GGUFFile, shape: Shape) -> tuple[Any, Any]:
    meta = Meta(gguf)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_base}
    scaling = meta.get("rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    elif scaling not in ("none", ""):
        raise meta.fail(f"its rope scaling {scaling!r} is not supported from GGUF: use the original Hugging Face model")
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": rope,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if shape.architecture == "llama":
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

        bias = "blk.0.attn_q.bias" in gguf.tensors
        return LlamaConfig(**common, attention_bias=bias), LlamaForCausalLM
    if shape.architecture == "qwen2":
        from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2ForCausalLM

        return Qwen2Config(**common, use_sliding_window=False), Qwen2ForCausalLM
    if shape.architecture == "qwen3":
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM

        return Qwen3Config(**common, use_sliding_window=False), Qwen3ForCausalLM
    from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

    pattern = meta.integer("attention.sliding_window_pattern", 6)
    scale_by = shape.hidden // shape.heads if shape.layers == 62 else shape.head_dim  # only the 27B differs
    common["rope_parameters"] = {
        "full_attention": rope,
        "sliding_attention": {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 1e4)},
    }
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(shape.layers)]
    return (
        Gemma3TextConfig(
            **common,
            layer_types=kinds,
            sliding_window=meta.integer("attention.sliding_window"),
            query_pre_attn_scalar=scale_by,
        ),
        Gemma3ForCausalLM,
    )


def _weights(gguf: GGUFFile, shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """The state dict by transformers' names. Raises ModelError for a tensor that has no place."""
    layer = _GEMMA_LAYER if shape.architecture == "gemma3" else _LAYER
    weights: dict[str, torch.Tensor] = {}
    for name in gguf.tensors:
        if name == "rope_freqs.weight":
            continue
        values = _undo(shape, name)(gguf.dequantize(name))
        weights[_name(gguf, name, layer)] = torch.from_numpy(values).to(device, dtype)
    return weights


def _name(gguf: GGUFFile, name: str, layer: dict[str, str]) -> str:
    if name in _OUTER:
        return _OUTER[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.rpartition(".")
    if not name.startswith("blk.") or not block.isdecimal() or part not in layer or kind not in ("weight", "bias"):
        raise ModelError(f"{gguf.path.name} has a tensor {name!r} that a {gguf.architecture} model does not use")
    return f"model.layers.{int(block)}.{layer[part]}.{kind}"


def _undo(shape: Shape, name: str) -> Callable[[F32], F32]:
    """What restores a tensor's values to those of the original checkpoint."""
    if shape.architecture == "gemma3" and "norm" in name:
        return lambda w: w - np.float32(1)
    if shape.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = shape.heads if ".attn_q." in name else shape.kv_heads
        return lambda w: _deinterleave(w, heads, name)
    return lambda w: w


def _deinterleave(w: F32, heads: int, name: str) -> F32:
    """Rows [heads * d, ...]: within a head, 0 d/2 1 d/2+1 ... is stored where 0 1 2 ... is expected."""
    if len(w) % (2 * heads):
        raise ModelError(f"tensor {name!r} has {len(w)} rows, which {heads} heads cannot share")
    parts = w.reshape(heads, len(w) // heads // 2, 2, *w.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(w.shape)
