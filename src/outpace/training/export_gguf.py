"""Learned drafters as GGUF files of llama.cpp's architectures eagle3 and dflash, with the target's tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from outpace.common.files import StrPath
from outpace.common.installing import install
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.config import Config, EagleConfig, ParallelConfig
from outpace.errors import MissingExtraError, ParameterError
from outpace.training.export import TargetRows, whole

TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
BLOCK = 32  # numbers that share a scale in q8_0 and q4_0
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MATRICES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def to_gguf(
    path: StrPath,
    checkpoint: Checkpoint,
    rows: TargetRows,
    target: StrPath,
    *,
    dtype: str = "bfloat16",
) -> str:
    """Write the file, whole or not at all, and say what llama.cpp calls its method (``--spec-type``).

    ``target``: the GGUF file that it drafts for. Raises ParameterError for what llama.cpp does not run, DrafterError
    for a drafter of another target, MissingExtraError.
    """
    gguf, path, target = _gguf(), Path(path), Path(target)
    if dtype not in TYPES:
        raise ParameterError(f"dtype {dtype} is none of those that are written: give one of {', '.join(TYPES)}")
    checkpoint = whole(checkpoint, rows)
    config, tensors = checkpoint.config, checkpoint.tensors
    if problem := unread(config, rows.layers):
        raise ParameterError(f"llama.cpp does not run this drafter ({problem}): export it to vLLM or SGLang")
    assert isinstance(config, EagleConfig | ParallelConfig)
    eagle, shape = isinstance(config, EagleConfig), config.decoder
    kind = gguf.GGMLQuantizationType[TYPES[dtype]]
    blocks = dtype in ("q8_0", "q4_0")
    if blocks:
        for size in (shape.hidden, shape.ffn, shape.heads * shape.head_dim):
            if size % BLOCK:
                raise ParameterError(f"dtype {dtype} takes rows of whole blocks of {BLOCK} numbers, and there are rows "
                                     f"of {size}: give bfloat16")  # fmt: skip
    name = "eagle3" if eagle else "dflash"
    with writing(path, name) as writer:
        writer.add_name(path.stem)
        writer.add_block_count(shape.layers)
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
        writer.add_array(f"{name}.target_layers", [k + 1 for k in config.hidden_layers])  # their inputs, ours: outputs
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, field in gguf.GGUFReader(target).fields.items():
            if key.startswith("tokenizer.") and key != "tokenizer.ggml.mask_token_id":
                copy_field(writer, key, field)
        for key, value in _described(config).items():
            (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(key, value)
        for key, values in _named(config, tensors).items():
            if key == "d2t":
                writer.add_tensor(key, values.astype(np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
            elif values.ndim < 2 or "norm" in key:
                writer.add_tensor(key, np.ascontiguousarray(values, np.float32))
            else:
                fits = gguf.GGMLQuantizationType.F32 if blocks and values.shape[-1] % BLOCK else kind
                writer.add_tensor(key, gguf.quantize(np.ascontiguousarray(values, np.float32), fits), raw_dtype=fits)
    if eagle:
        return "draft-eagle3"
    return "draft-dspark" if config.markov_rank else "draft-dflash"  # type: ignore[union-attr]


def unread(config: Config, layers: int) -> str | None:
    """What of a drafter llama.cpp has not, in words; None: it runs it. ``layers``: the target's."""
    if not isinstance(config, EagleConfig | ParallelConfig):
        return "it is of the method medusa"
    if config.hidden_layers[-1] + 1 >= layers:
        return "it reads the target's last layer, and llama.cpp hands out what enters a layer"
    if config.decoder.gemma or config.decoder.conv[0] or config.decoder.logit_cap:
        return "its layers are Gemma 4's or DFlash2's, or its logits are capped"
    if config.decoder.scaling or any(config.decoder.windows):
        return "its rotations are stretched, or its layers have windows"
    if isinstance(config, ParallelConfig):
        if not config.decoder.qk_norm:
            return "its query and key heads have no norms"
        if config.markov_rank and config.markov != "vanilla":
            return f"its Markov head is {config.markov}"
        return None if config.markov_rank or not config.sample_from_anchor else "it predicts at the pending token"
    if config.decoder.qk_norm or config.decoder.layers != 1 or config.mask_token is not None:
        return "it has norms of query and key heads, more than one layer, or masks"
    if len(config.hidden_layers) != 3:
        return f"it reads {len(config.hidden_layers)} layers of the target, and not 3"
    if config.fc_norm or config.norm_output:
        return "it is an EAGLE-3.1, with a norm for each layer before fc, or a normed state that is fed back"
    return None


def _described(config: EagleConfig | ParallelConfig) -> dict[str, int | bool]:
    if isinstance(config, EagleConfig):
        flags = {name: bool(getattr(config, name)) for name in ("norm_before_residual", "norm_before_fc")}
        sizes: dict[str, int | bool] = {"eagle3.target_hidden_size": config.decoder.hidden}
        return sizes | {f"eagle3.{name}": value for name, value in flags.items()}
    return {
        "dflash.block_size": config.block, "dflash.sample_from_anchor": config.sample_from_anchor,
        "dflash.attention.causal": False, "dflash.has_confidence_head": _confident(config),
        "tokenizer.ggml.mask_token_id": config.mask_token,
    }  # fmt: skip


def _confident(config: ParallelConfig) -> bool:
    """Whether llama.cpp runs its confidence head: one that reads the token before."""
    return config.confidence and config.confidence_markov and config.markov_rank > 0


def _named(config: EagleConfig | ParallelConfig, tensors: Any) -> dict[str, Any]:
    """The tensors by llama.cpp's names."""
    shape = config.decoder
    found = {"fc.weight": tensors["fc.weight"], "output_norm.weight": tensors["norm.weight"]}
    found["output.weight"] = tensors["lm_head.weight"]
    if config.draft_vocab < config.vocab:
        found["d2t"] = np.arange(config.draft_vocab) + tensors["d2t"]  # whole ids; ours: what is to be added
    for i in range(shape.layers):
        at = f"layers.{i}."
        names = {**_NORMS, **_MATRICES, **(_HEADS if shape.qk_norm else {})}
        for theirs, ours in names.items():
            found[f"blk.{i}.{theirs}.weight"] = tensors[f"{at}{ours}.weight"]
    if isinstance(config, EagleConfig):
        found["blk.0.attn_norm_2.weight"] = tensors["layers.0.hidden_norm.weight"]
        for name, heads in {"attn_q": shape.heads, "attn_k": shape.kv_heads}.items():
            found[f"blk.0.{name}.weight"] = pairs(found[f"blk.0.{name}.weight"], heads)
        if config.norm_before_fc:
            found["enc.output_norm.weight"] = tensors["input_norm.weight"]
    else:
        found["enc.output_norm.weight"] = tensors["hidden_norm.weight"]
        if config.markov_rank:
            found |= {f"markov_{w}.weight": tensors[f"markov_head.markov_{w}.weight"] for w in ("w1", "w2")}
        if _confident(config):
            found |= {f"conf_proj.{part}": tensors[f"confidence_head.proj.{part}"] for part in ("weight", "bias")}
    return found


def pairs(values: Any, heads: int) -> Any:
    """Each head's halves as pairs, which llama.cpp rotates in its Llamas."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


@contextmanager
def writing(target: Path, architecture: str) -> Iterator[Any]:
    """A GGUFWriter, whose keys and tensors become the file ``target`` when the block ends. Raises MissingExtraError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    writer = _gguf().GGUFWriter(part, architecture)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def copy_field(writer: Any, name: str, field: Any) -> None:
    """A key of another GGUF file, as gguf's reader has it."""
    from gguf import GGUFValueType

    kind = field.types[0]
    writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)


def _gguf() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"writing GGUF files needs gguf: {install('outpace[torch]')}") from error
    return gguf
