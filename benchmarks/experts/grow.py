"""A mixture of experts that computes what a dense model of the Llama family computes: real text, a mixture's costs.

A feed-forward layer is a sum over its inner rows. It is cut into as many slices as a token has experts, ``used``; the
``experts`` are copies of these slices. The router has one random direction for all slices of a copy, so that a token
goes to the ``used`` slices of one copy, with equal weights: their sum, times ``used``, is the dense layer's output up
to rounding. Different tokens go to different copies, so W independent ones read E (1 - (1 - K/E)^W) experts as in any
mixture whose load is even. Weights stay in their blocks (Q4_1 among those), and no value is rounded anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
# A layer's number -> what its feed-forward reads of some text, float32 [tokens, hidden], its norm's weights aside.
Inputs = Callable[[int], npt.NDArray[np.float32]]

_SCALED = {"Q4_1": 2, "Q5_1": 2, "Q4_0": 1, "Q5_0": 1, "Q8_0": 1}  # float16 numbers at a block's beginning
_DIRECTIONS = 48  # directions of a layer's inputs, the longest ones, in which routers look


def grow(source: Path, out: Path, inputs: Inputs, *, experts: int = 64, used: int = 8, inner: int = 256) -> None:
    """Write ``out``; ``inner``: rows of an expert, those beyond its slice being zero. Raises ValueError for what does
    not fit."""
    reader = gguf.GGUFReader(source)
    facts = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    if facts["general.architecture"].contents() != "llama":
        raise ValueError(f"{source} is no model of the Llama family")
    size = facts["llama.feed_forward_length"].contents()
    if experts % used or size % (32 * used) or inner % 32 or inner < size // used:
        raise ValueError(
            f"{size} rows cannot be {used} slices of at most {inner}, or {experts} experts no copies of them"
        )
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    changed = {"llama.feed_forward_length": inner}
    for key, field in facts.items():
        if key != "general.architecture":
            among = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, changed.get(key, field.contents()), field.types[0], sub_type=among)
    writer.add_uint32("llama.expert_count", experts)
    writer.add_uint32("llama.expert_used_count", used)
    norms = {tensor.name: np.array(tensor.data) for tensor in reader.tensors if "ffn_norm" in tensor.name}
    for tensor in reader.tensors:
        names = tensor.name.split(".")
        if names[0] != "blk" or names[2] not in ("ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=_type_of(tensor))
            continue
        cut = _columns if names[2] == "ffn_down" else _rows
        slices = cut(tensor, used, inner)
        writer.add_tensor(
            f"blk.{names[1]}.{names[2]}_exps.weight",
            np.tile(slices, (experts // used, 1, 1)),
            raw_dtype=_type_of(tensor),
        )
        if names[2] == "ffn_gate":
            layer = int(names[1])
            read = inputs(layer) * norms[f"blk.{layer}.ffn_norm.weight"]
            writer.add_tensor(
                f"blk.{layer}.ffn_gate_inp.weight", np.repeat(_router(read, experts // used, layer), used, 0)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, out)


def _type_of(tensor: Any) -> Any:
    return None if tensor.tensor_type == gguf.GGMLQuantizationType.F32 else tensor.tensor_type


def _rows(tensor: Any, used: int, inner: int) -> Bytes:
    """[used, inner, bytes] of [rows, bytes]."""
    data = np.array(tensor.data).reshape(used, -1, tensor.data.shape[-1])
    return np.pad(data, ((0, 0), (0, inner - data.shape[1]), (0, 0)))


def _columns(tensor: Any, used: int, inner: int) -> Bytes:
    """[used, rows, bytes of inner] of [rows, bytes of all]; values times ``used``, a power of two, so that none is
    rounded."""
    kind = tensor.tensor_type.name
    length, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    if kind not in _SCALED or used & (used - 1):
        raise ValueError(f"{tensor.name} of type {kind} cannot be scaled by {used}")
    data = np.array(tensor.data)
    blocks = data.reshape(len(data), -1, size)
    scales = np.ascontiguousarray(blocks[..., : 2 * _SCALED[kind]]).view(np.float16)
    blocks[..., : 2 * _SCALED[kind]] = (scales * np.float16(used)).view(np.uint8)
    data = blocks.reshape(len(data), used, -1).transpose(1, 0, 2)
    return np.pad(data, ((0, 0), (0, 0), (0, inner // length * size - data.shape[2])))


def _router(read: npt.NDArray[np.float32], copies: int, seed: int) -> npt.NDArray[np.float32]:
    """[copies, hidden]: random directions in which the inputs [tokens, hidden] of a layer vary alike, around 0."""
    values = read.astype(np.float64)
    mean = values.mean(0)
    mean /= np.linalg.norm(mean)
    values -= np.outer(values @ mean, mean)  # what all tokens have in common would send them to one copy
    _, lengths, directions = np.linalg.svd(values, full_matrices=False)
    most = min(_DIRECTIONS, int((lengths > 1e-6 * lengths[0]).sum()))
    scales = np.sqrt(len(values)) / lengths[:most]
    drawn = np.random.default_rng(seed).standard_normal((copies, most)) * scales
    return np.asarray(drawn @ directions[:most], np.float32)
