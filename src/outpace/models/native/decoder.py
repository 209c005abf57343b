"""Decoders of the Llama family as data: what the native runtime needs to know, from GGUF metadata or config.json.

One description covers Llama, SmolLM, Mistral, Qwen2 (biases), Qwen3 (norms of query and key heads) and Gemma 3 (norms
on both sides, GeGLU, scaled embeddings, windowed and global layers with a rope base each).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outpace.arrays import F32
from outpace.models.formats.facts import Facts, read_config
from outpace.models.formats.gguf import GGUFFile

MAX_HEAD = 256  # native/kernels/table.h
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder's shape and arithmetic; weights not included."""

    architecture: str
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    attention_scale: float
    embedding_scale: float
    activation: str  # "silu" or "gelu_tanh"
    max_length: int
    ropes: tuple[F32, ...]  # inverse frequencies [head_dim / 2] of each rope table
    layer_rope: tuple[int, ...]  # which table, by layer
    windows: tuple[int, ...]  # positions a token sees, itself among them, by layer; 0: all
    tied: bool

    @property
    def layers(self) -> int:
        return len(self.windows)


_VERDICT = "cannot be served by the native backend"


def _described(name: str, facts: Mapping[str, Any], prefix: str = "") -> Facts:
    return Facts(name, facts, prefix, _VERDICT)


def inverse_frequencies(base: float, head_dim: int) -> F32:
    """float32 [head_dim / 2]: base^(-2 i / head_dim) (Su et al., arXiv 2104.09864)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1) / np.float32(base) ** exponents).astype(np.float32)


def from_gguf(gguf: GGUFFile) -> Decoder:
    """The decoder that a GGUF file describes. Raises ModelError when it is not one this runtime knows."""
    architecture = gguf.architecture
    facts = _described(gguf.path.name, gguf.metadata, f"{architecture}.")
    if architecture not in GGUF_ARCHITECTURES:
        raise facts.fail(f"the architecture {architecture!r} is not one of {', '.join(GGUF_ARCHITECTURES)}")
    if facts.get("expert_count", 0):
        raise facts.fail("it is a mixture of experts")
    gemma = architecture == "gemma3"
    hidden, heads = facts.whole("embedding_length"), facts.whole("attention.head_count", most=1 << 16)
    head_dim = facts.whole("attention.key_length", max(1, hidden // heads), most=1 << 12)
    embedding = gguf.info("token_embd.weight").shape
    layers = facts.whole("block_count", most=1 << 12)
    if f"blk.{layers - 1}.attn_q.weight" not in gguf.tensors:
        raise facts.fail(f"it announces {layers} layers, but the last one's tensors are missing")
    if len(embedding) != 2:
        raise facts.fail("token_embd.weight is not a matrix")
    if facts.whole("attention.value_length", head_dim) != head_dim:
        raise facts.fail("its keys and values differ in width")
    if facts.whole("rope.dimension_count", head_dim) != head_dim:
        raise facts.fail("it rotates only a part of each head")
    if facts.get("attn_logit_softcapping") or facts.get("final_logit_softcapping"):
        raise facts.fail("it caps its logits softly")
    frequencies = inverse_frequencies(facts.number("rope.freq_base", 1e6 if gemma else 1e4), head_dim)
    scaling = facts.get("rope.scaling.type", "none")
    if scaling == "linear":
        frequencies = frequencies / np.float32(facts.number("rope.scaling.factor"))
    elif scaling not in ("none", ""):
        raise facts.fail(f"its rope scaling {scaling!r} is not supported (linear and llama3 are)")
    if "rope_freqs.weight" in gguf.tensors:
        divisors = gguf.dequantize("rope_freqs.weight").reshape(-1)
        if divisors.shape != frequencies.shape or not (divisors > 0).all():
            raise facts.fail(f"rope_freqs.weight does not fit its {len(frequencies)} frequencies")
        frequencies = frequencies / divisors
    ropes: tuple[F32, ...] = (frequencies,)
    windows, layer_rope = [0] * layers, [0] * layers
    if gemma:
        ropes = (frequencies, inverse_frequencies(facts.number("rope.freq_base_swa", 1e4), head_dim))
        every, window = facts.whole("attention.sliding_window_pattern", 6), facts.whole("attention.sliding_window")
        windows = [0 if (i + 1) % every == 0 else window for i in range(layers)]
        layer_rope = [int(w > 0) for w in windows]
    scale_by = hidden // heads if gemma and layers == 62 else head_dim  # of Gemma 3, only the 27B differs
    return _checked(
        facts,
        Decoder(
            architecture=architecture,
            vocab=embedding[0],
            hidden=hidden,
            heads=heads,
            kv_heads=facts.whole("attention.head_count_kv", heads, most=1 << 16),
            head_dim=head_dim,
            inner=facts.whole("feed_forward_length"),
            eps=facts.number("attention.layer_norm_rms_epsilon"),
            attention_scale=scale_by**-0.5,
            embedding_scale=math.sqrt(hidden) if gemma else 1.0,
            activation="gelu_tanh" if gemma else "silu",
            max_length=facts.whole("context_length"),
            ropes=ropes,
            layer_rope=tuple(layer_rope),
            windows=tuple(windows),
            tied="output.weight" not in gguf.tensors,
        ),
    )


def from_folder(folder: Path) -> Decoder:
    """The decoder that a Hugging Face folder's config.json describes. Raises ModelError as from_gguf does."""
    config = read_config(folder)
    facts = _described(str(folder), config)
    named = next(iter(config.get("architectures") or [None]))
    if named not in HF_ARCHITECTURES:
        raise facts.fail(f"the architecture {named!r} is not one of {', '.join(HF_ARCHITECTURES)}")
    if "auto_map" in config:
        raise facts.fail("it brings its own code")
    if "quantization_config" in config:
        raise facts.fail("its weights are quantised in a format other than GGUF")
    gemma = named == "Gemma3ForCausalLM"
    activation = facts.get("hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu")
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if activation not in known:
        raise facts.fail(f"its activation {activation!r} is not supported")
    if facts.get("mlp_bias"):
        raise facts.fail("its feed-forward layers have biases")
    if facts.get("attn_logit_softcapping") or facts.get("final_logit_softcapping"):
        raise facts.fail("it caps its logits softly")
    if facts.get("use_bidirectional_attention"):
        raise facts.fail("it attends in both directions")
    hidden, heads = facts.whole("hidden_size"), facts.whole("num_attention_heads", most=1 << 16)
    head_dim = facts.whole("head_dim", 256 if gemma else max(1, hidden // heads), most=1 << 12)
    layers = facts.whole("num_hidden_layers", most=1 << 12)
    windows = _windows(facts, layers, gemma)
    ropes = tuple(_folder_ropes(facts, head_dim, gemma))
    scale_by = facts.number("query_pre_attn_scalar", 256.0) if gemma else float(head_dim)
    return _checked(
        facts,
        Decoder(
            architecture=HF_ARCHITECTURES[named],
            vocab=facts.whole("vocab_size"),
            hidden=hidden,
            heads=heads,
            kv_heads=facts.whole("num_key_value_heads", heads, most=1 << 16),
            head_dim=head_dim,
            inner=facts.whole("intermediate_size"),
            eps=facts.number("rms_norm_eps", 1e-6),
            attention_scale=scale_by**-0.5,
            embedding_scale=math.sqrt(hidden) if gemma else 1.0,
            activation=known[activation],
            max_length=facts.whole("max_position_embeddings"),
            ropes=ropes,
            layer_rope=tuple(int(gemma and w > 0) for w in windows),
            windows=tuple(windows),
            tied=bool(facts.get("tie_word_embeddings", gemma)),
        ),
    )


def _windows(facts: Facts, layers: int, gemma: bool) -> list[int]:
    window = facts.get("sliding_window")
    kinds = facts.get("layer_types")
    if window is None or (not gemma and facts.get("use_sliding_window") is False):
        return [0] * layers
    window = facts.whole("sliding_window")
    if kinds is None:
        every = facts.whole("sliding_window_pattern", 6) if gemma else 0
        if not gemma and facts.get("max_window_layers") is not None:
            first = facts.get("max_window_layers")
            return [window if i >= first else 0 for i in range(layers)]
        return [0 if every and (i + 1) % every == 0 else window for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise facts.fail("layer_types must name full_attention or sliding_attention for each layer")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _folder_ropes(facts: Facts, head_dim: int, gemma: bool) -> Iterator[F32]:
    """Rope tables: for Gemma the global one, then the local one."""
    parameters = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise facts.fail("rope_parameters is not an object")
    full = parameters.get("full_attention", parameters)
    yield _rope(_described(facts.name, full), facts.number("rope_theta", 1e6 if gemma else 1e4), head_dim)
    if gemma:
        local = parameters.get("sliding_attention", {})
        yield _rope(_described(facts.name, local), facts.number("rope_local_base_freq", 1e4), head_dim)


def _rope(facts: Facts, base: float, head_dim: int) -> F32:
    frequencies = inverse_frequencies(facts.number("rope_theta", base), head_dim)
    kind = facts.get("rope_type", facts.get("type", "default"))
    if facts.get("partial_rotary_factor", 1.0) != 1.0:
        raise facts.fail("it rotates only a part of each head")
    if kind == "default":
        return frequencies
    factor = np.float32(facts.number("factor"))
    if kind == "linear":
        return frequencies / factor
    if kind != "llama3":
        raise facts.fail(f"its rope scaling {kind!r} is not supported (linear and llama3 are)")
    # Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended.
    low, high = np.float32(facts.number("low_freq_factor")), np.float32(facts.number("high_freq_factor"))
    context = np.float32(facts.number("original_max_position_embeddings"))
    wavelength = np.float32(2 * math.pi) / frequencies
    blend = (context / wavelength - low) / (high - low)
    between = (np.float32(1) - blend) * frequencies / factor + blend * frequencies
    stretched = np.where(wavelength > context / low, frequencies / factor, between)
    return np.where(wavelength < context / high, frequencies, stretched).astype(np.float32)


def _checked(facts: Facts, decoder: Decoder) -> Decoder:
    if decoder.head_dim > MAX_HEAD:
        raise facts.fail(f"its heads are {decoder.head_dim} wide, and {MAX_HEAD} is the most")
    if decoder.heads % decoder.kv_heads or decoder.head_dim % 2:
        raise facts.fail(
            f"{decoder.heads} heads, {decoder.kv_heads} KV heads of {decoder.head_dim} do not fit together"
        )
    return decoder
