"""GGUF files of families without a reader of ours, as transformers models.

transformers knows what a family's metadata and tensors are called (``modeling_gguf_pytorch_utils``). It passes over
tensors without a place, draws missing ones at random and leaves out metadata that changes the arithmetic, so all of
that is checked here, and what would compute another model is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from outpace.errors import ModelError
from outpace.models import metadata
from outpace.models.families import FAMILIES
from outpace.models.refused import RECURRENT
from outpace.models.torch.gguf import empty, filled
from outpace.models.weights.facts import Facts
from outpace.models.weights.gguf import GGUFFile

# What transformers' own names hide: a file's architecture -> their model type.
_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}
_NO_DECODERS = ("general", "tokenizer", "t5", "umt5")
_UNREAD = ("gemma4",)  # layers differ in their heads, which transformers' reader does not take
_OURS = ("mistral", "gemma3_text")  # transformers' names for files that name a family of ours
_LARGEST_GEMMA2 = 46  # layers; the one whose attention is scaled by hidden / heads (llama.cpp, LLM_TYPE_27B)
# Metadata that changes the arithmetic, and where a configuration says the same.
_SAME: dict[str, tuple[str, ...]] = {
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "use_parallel_residual": ("use_parallel_residual",),
}
# What the tensors' shapes say as well, which are compared with the configuration's.
_SHAPES = ("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length")


def kv_numbers(gguf: GGUFFile) -> int:
    """Numbers that one position of keys and values takes. Raises ModelError for a family that nobody here reads."""
    meta = _known(gguf)
    if not meta.get("attention.head_count", 0):
        return 0  # recurrent: the backend says why it does not serve that
    layers, heads = meta.whole("block_count"), meta.whole("attention.head_count")
    key = meta.whole("attention.key_length", max(1, meta.whole("embedding_length") // heads))
    each = meta.get("attention.head_count_kv", heads)
    in_all = int(each.sum()) if isinstance(each, np.ndarray) else layers * meta.whole("attention.head_count_kv", heads)
    return in_all * (key + meta.whole("attention.value_length", key))


def _known(gguf: GGUFFile) -> Facts:
    meta = Facts(gguf.path.name, gguf.metadata, f"{gguf.architecture}.", "cannot be loaded")
    import transformers
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    kind = _TYPES.get(gguf.architecture, gguf.architecture)
    if kind not in GGUF_SUPPORTED_ARCHITECTURES or kind in (*_NO_DECODERS, *_UNREAD):
        known = sorted(architectures(GGUF_SUPPORTED_ARCHITECTURES))
        raise meta.fail(
            f"the architecture {gguf.architecture!r} is not supported from GGUF (with transformers "
            f"{transformers.__version__}, {', '.join(known)} are): use the original Hugging Face model"
        )
    return meta


def architectures(supported: Iterable[str]) -> set[str]:
    """What files of served models have as general.architecture; ``supported``: transformers' names of them."""
    files = {name: architecture for architecture, name in _TYPES.items()}
    own = {each.gguf for each in FAMILIES if each.gguf and not (each.recurrent or each.mixture or each.modules)}
    others = {*supported} - {*_NO_DECODERS, *_UNREAD, *_OURS}
    return own | {files.get(name, name) for name in others} - RECURRENT


def build(gguf: GGUFFile, dtype: torch.dtype, device: torch.device) -> Any:
    """The PreTrainedModel in evaluation mode. Raises ModelError when the file is incomplete or not supported."""
    meta = _known(gguf)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(gguf.path.parent), gguf_file=gguf.path.name)
    _honour(meta, gguf, config)
    module = empty(config, dtype, device)
    return filled(gguf, module, _weights(gguf, config, module))


def _honour(meta: Facts, gguf: GGUFFile, config: Any) -> None:
    """Put into ``config`` what transformers leaves out. Raises ModelError for what it cannot express."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if meta.get("context_length") is not None and hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = meta.whole("context_length")
    config.vocab_size = gguf.info("token_embd.weight").shape[0]
    _honour_rope(meta, config)
    window = meta.get("attention.sliding_window") or None
    if window != getattr(config, "sliding_window", None):
        if not hasattr(config, "sliding_window") or getattr(config, "layer_types", None) is not None:
            raise _other(meta, "attention.sliding_window", getattr(config, "sliding_window", None))
        config.sliding_window = None if window is None else meta.whole("attention.sliding_window")
    if gguf.architecture == "gemma2" and config.num_hidden_layers == _LARGEST_GEMMA2:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    for key, names in _SAME.items():
        configured = next((getattr(config, name) for name in names if hasattr(config, name)), None)
        if meta.get(key) is not None and not metadata.equal(meta.get(key), configured):
            raise _other(meta, key, configured)
    read = GGUF_CONFIG_MAPPING.get(_TYPES.get(gguf.architecture, gguf.architecture), {})
    for key in (*_SHAPES, *(key for key, name in read.items() if name is not None)):
        meta.get(key)
    heads = getattr(config, "num_attention_heads", None) or 1
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    longest = meta.whole("context_length", 1 << 30)
    metadata.refuse_unread(meta, longest, hidden=config.hidden_size, head_dim=head, rotated=head)


def _honour_rope(meta: Facts, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if meta.get("rope.freq_base") is not None:
        base = meta.number("rope.freq_base")
        if "rope_theta" in rope:
            rope["rope_theta"] = base
        else:
            raise _other(meta, "rope.freq_base", None)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head * rope.get("partial_rotary_factor", 1.0))
    if meta.get("rope.dimension_count") is not None and meta.whole("rope.dimension_count") != rotated:
        share = meta.whole("rope.dimension_count") / head
        if "partial_rotary_factor" not in rope or int(head * share) != meta.whole("rope.dimension_count"):
            raise _other(meta, "rope.dimension_count", rotated)
        rope["partial_rotary_factor"] = share
    kind = meta.get("rope.scaling.type", "linear")
    if kind not in ("none", "", "linear"):
        raise _other(meta, "rope.scaling.type", "none")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if kind == "linear" and meta.get(key, 0) not in (0, 1):
            raise _other(meta, key, 1)


def _other(meta: Facts, key: str, configured: Any) -> ModelError:
    value = meta.get(key)
    return meta.fail(
        f"its {meta.prefix}{key} is {value!r}, where transformers' GGUF support has {configured!r}: "
        "use the original Hugging Face model"
    )


def _weights(gguf: GGUFFile, config: Any, module: Any) -> Iterator[tuple[str, Any]]:
    """The file's tensors by the names of the module's; by their own where it has none."""
    from transformers import modeling_gguf_pytorch_utils as reader

    processor = reader.TENSOR_PROCESSORS.get(gguf.architecture, reader.TensorProcessor)(config=config.to_dict())
    places = reader.get_gguf_hf_weights_map(module, processor)
    beside: dict[str, Any] = {}  # experts, which a processor puts together from several tensors
    for tensor in gguf.tensors:
        done = processor.process(
            weights=gguf.dequantize(tensor),
            name=tensor,
            tensor_key_mapping=places,
            parsed_parameters={"tensors": beside},
        )
        if done.name is not None:
            yield places.get(done.name, tensor), done.weights
    for name, values in beside.items():
        yield name, values.numpy()
